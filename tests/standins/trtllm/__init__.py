"""Stand-ins for TensorRT-LLM's programs and Python package, as documented: ``install`` puts them into a folder.

They refuse what the real ones would refuse (unknown flags, fields, tensors), write what those write, rewrite flags as
those do, and compute the answers of the served tensors with torch. ``TRTLLM_STANDIN_FAULT`` makes them fail in the
ways that users of the real ones report; ``FAULTS`` lists them. Names come from
``pipeline/engines/tensorrt_llm/documented.py``.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
SITE = Path(__file__).with_name("site")
FAULT = "TRTLLM_STANDIN_FAULT"
HOME = "TRTLLM_STANDIN_HOME"
# What the 1.2.1 container holds, but for the name of the GPU.
VERSIONS = {
    "tensorrt_llm": "1.2.1",
    "tensorrt": "10.14.1.48",
    "torch": "2.9.1",
    "nvidia_modelopt": "0.37.0",
    "transformers": "4.57.3",
}
FAULTS = frozenset({
    *("export-killed", "export-lost", "build-killed", "build-gpu-memory", "build-no-config", "build-no-rank"),
    *("build-empty-rank", "build-smaller", "build-vocabulary", "build-unquantised", "build-hangs", "serve-dies"),
    "serve-reuse",
})  # fmt: skip

NVIDIA_SMI = """\
case "$*" in
  *--query-gpu*) for gpu in $(seq {gpus}); do echo "NVIDIA H100 80GB HBM3, {sm}, 580.95.05, 81559, {free_mib}"; done;;
  *) echo "| NVIDIA-SMI 580.95.05   Driver Version: 580.95.05   CUDA Version: 13.0 |";;
esac
"""
PYTHON = """\
case "${{{fault}:-}} $*" in
  "export-killed "*convert*) kill -9 $$;;
  "export-lost "*convert*) "{python}" -m tests.standins.trtllm.lost "$@"; exit $?;;
esac
exec "{python}" "$@"
"""


def install(
    folder: Path,
    *,
    profile: str = "engine",
    sm: str = "9.0",
    gpus: int = 1,
    free_mib: int = 80000,
    versions: dict[str, str] | None = None,
    without: dict[str, list[str]] | None = None,
) -> Path:
    """A virtual environment's ``bin`` with TensorRT-LLM in it; returns its ``python``.

    ``profile`` pytorch: a later line, without ``trtllm-build`` and the engine's Python module. ``without``: names that
    this version lacks, by the thing that would know them.
    """
    site = folder / "site"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(SITE, site, ignore=shutil.ignore_patterns("__pycache__"))
    for name, version in (VERSIONS | (versions or {})).items():
        info = site / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    settings = {"profile": profile, "sm": sm, "version": (VERSIONS | (versions or {}))["tensorrt_llm"]}
    (folder / "settings.json").write_text(json.dumps(settings | {"without": without or {}}))
    (folder / "bin").mkdir()
    _script(folder, "python", PYTHON.format(fault=FAULT, python=sys.executable), [site, ROOT])
    _script(folder, "nvidia-smi", NVIDIA_SMI.format(sm=sm, gpus=gpus, free_mib=free_mib), [])
    _script(folder, "python3", f'exec "{folder}/bin/python" "$@"\n', [])
    _script(folder, "container", f'export PATH="{folder}/bin:$PATH"\nexec "$@"\n', [])  # as `docker run IMAGE`
    programs = ["trtllm-serve", *(["trtllm-build"] if profile == "engine" else [])]
    for name in programs:
        module = f"tests.standins.trtllm.{name.removeprefix('trtllm-')}"
        _script(folder, name, f'exec "{sys.executable}" -m {module} "$@"\n', [ROOT])
    if profile == "pytorch":
        shutil.rmtree(site / "tensorrt_llm" / "_tensorrt_engine")
    return folder / "bin" / "python"


def settings() -> dict[str, Any]:
    """What ``install`` was given, for the stand-ins."""
    found: dict[str, Any] = json.loads((Path(os.environ[HOME]) / "settings.json").read_text())
    return found


def fault() -> str:
    """The fault that was asked for; empty for none."""
    asked = os.environ.get(FAULT, "")
    if asked and asked not in FAULTS:
        raise ValueError(f"no such fault: {asked}")
    return asked


def _script(folder: Path, name: str, text: str, path: list[Path]) -> None:
    lines = ["#!/bin/sh", f'export {HOME}="{folder}"']
    if path:
        lines.append(f'export PYTHONPATH="{os.pathsep.join(map(str, path))}${{PYTHONPATH:+:$PYTHONPATH}}"')
    file = folder / "bin" / name
    file.write_text("\n".join([*lines, text]))
    file.chmod(0o755)
