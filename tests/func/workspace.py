"""What the stages export, quantize and build start from; and those stages."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from pipeline.files import write_json
from stages import build, export, quantize
from tests.tiny import rows, tokenizer

ROOT = Path(__file__).parents[2]


def make_workspace(root: Path, checkpoint: Path, params: str) -> None:
    """Fills the folder ``root``: checkpoint, recipes, calibration sample, intake, a platform without a GPU."""
    shutil.copytree(checkpoint, root / "artifacts/checkpoint")
    shutil.copytree(ROOT / "recipes", root / "recipes")
    (root / "params.yaml").write_text(params)
    words = tokenizer()
    (root / "calib_data").mkdir()
    with (root / "calib_data/calib.jsonl").open("w") as file:
        for row in rows(20, seed=1):
            file.write(f'{{"token_ids": {words(row["source"] + " " + row["target"])["input_ids"]}}}\n')
    write_json(root / "calib_data/card.json", {"digests": {"calibration": "sha256:0"}})
    write_json(root / "artifacts/checkpoint.json", {"fingerprints": {"weights": "sha256:tiny"}, "source": {}})
    write_json(root / "artifacts/platform.json", {"device": {"gpu": None, "sm": None, "tensorrt": None}})


def run_stages(monkeypatch: pytest.MonkeyPatch, recipes: Sequence[str]) -> None:
    """Export, quantize and build, in the current folder: the engine ``runtime`` and one for each recipe."""
    export.main()
    for stage, names in ((quantize, recipes), (build, ("runtime", *recipes))):
        for name in names:
            monkeypatch.setattr(sys, "argv", [stage.__name__, name])
            stage.main()
