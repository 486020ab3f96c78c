"""The gate stays pure: it imports nothing heavy, and ``decide`` opens nothing and asks no clock."""

from __future__ import annotations

import ast
import builtins
import io
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from pipeline.gate.evidence import Evidence
from pipeline.gate.policy import Policy
from pipeline.gate.verdict import decide

ROOT = pathlib.Path(__file__).parents[3]
OURS = ("pipeline.gate", "pipeline.evaluate", "pipeline.records", "pipeline.errors", "pipeline.files")
THEIRS = ("numpy", "scipy", "sacrebleu")
LOADER = ("policy.py", "pipeline.config")  # load_policy alone reads a file


@pytest.mark.parametrize("package", ["gate", "evaluate"])
def test_only_these_imports(package: str) -> None:
    for path in sorted((ROOT / "pipeline" / package).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                top = name.split(".")[0]
                allowed = top in sys.stdlib_module_names or top in THEIRS or name.startswith(OURS)
                assert allowed or (path.name, name) == LOADER, f"{path.name} imports {name}"


def test_nothing_heavy_is_loaded() -> None:
    heavy = ("torch", "transformers", "pydantic", "datasets", "onnxruntime", "matplotlib")
    code = f"import sys, pipeline.gate.verdict; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_decide_opens_nothing_and_asks_no_clock(
    make: Callable[..., Evidence], tools: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    evidence = make(tools["sentences"](30))
    first = decide(evidence, Policy())  # lazy imports happen here

    def refuse(*_args: Any, **_more: Any) -> None:
        raise AssertionError("the gate must be pure")

    for owner, name in ((builtins, "open"), (io, "open"), (os, "open"), (time, "time"), (time, "perf_counter")):
        monkeypatch.setattr(owner, name, refuse)
    second = decide(evidence, Policy())
    monkeypatch.undo()
    assert first == second
