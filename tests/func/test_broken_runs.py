"""A stage that is interrupted or runs out of disk leaves nothing half-written, says why, and works the next time."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.files import digest_tree
from tests.func.workspace import make_workspace

ROOT = Path(__file__).parents[2]


@pytest.fixture
def workspace(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    make_workspace(tmp_path, tiny_checkpoint, "calib: {batch_tokens: 64, max_tokens: 64}\n")
    return tmp_path


def _start(workspace: Path, *stage: str, file_limit: int | None = None) -> subprocess.Popen[str]:
    def limit() -> None:
        if file_limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))

    return subprocess.Popen(
        [sys.executable, "-m", *stage],
        cwd=workspace,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=limit,  # noqa: PLW1509 - no threads here
    )


def _run(workspace: Path, *stage: str, file_limit: int | None = None) -> tuple[int, str]:
    process = _start(workspace, *stage, file_limit=file_limit)
    text, _ = process.communicate(timeout=120)
    return process.returncode, text


def _debris(workspace: Path) -> list[Path]:
    return [path for path in workspace.rglob("*") if path.suffix in {".part", ".old"}]


def test_export_quantize_and_build_when_the_disk_is_full(workspace: Path) -> None:
    """A limit on the size of a file stands for the disk: every writer (NumPy, safetensors, ONNX) meets it."""
    for stage, target in (
        (("stages.export",), "artifacts/onnx"),
        (("stages.quantize", "int8_sq"), "artifacts/quantized/int8_sq"),
        (("stages.build", "int8_sq"), "engines/int8_sq"),
    ):
        code, text = _run(workspace, *stage, file_limit=50_000)
        assert code == 74, text
        assert f"error: {target}: no space left on the disk" in text
        assert "Traceback" not in text
        assert not (workspace / target).exists()
        assert _debris(workspace) == []
        code, text = _run(workspace, *stage)
        assert code == 0, text
        assert (workspace / target).exists()


def test_ctrl_c_in_a_stage(workspace: Path) -> None:
    assert _run(workspace, "stages.export")[0] == 0
    before = digest_tree(workspace / "artifacts/onnx")
    process = _start(workspace, "stages.export")
    assert process.stdout is not None
    for line in process.stdout:
        if "exporting" in line:
            process.send_signal(signal.SIGINT)
            break
    text = process.stdout.read()
    assert process.wait(timeout=60) == 130, text
    assert "interrupted: nothing was half-written" in text
    assert digest_tree(workspace / "artifacts/onnx") == before
    assert _debris(workspace) == []


def test_a_killed_run_leaves_no_debris_after_the_next_one(workspace: Path) -> None:
    process = _start(workspace, "stages.export")
    assert process.stdout is not None
    while not _debris(workspace):
        assert process.poll() is None, process.stdout.read()
    process.kill()
    process.wait(timeout=60)
    assert _debris(workspace) != []
    assert not (workspace / "artifacts/onnx").exists()
    assert _run(workspace, "stages.export")[0] == 0
    assert _debris(workspace) == []


def test_an_engine_is_the_same_bytes_each_time(workspace: Path) -> None:
    """What was judged is what is promoted, and `dvc repro` elsewhere gives the same digest."""
    digests = []
    for _ in range(2):
        for stage in (("stages.export",), ("stages.quantize", "int8_mixed"), ("stages.build", "int8_mixed")):
            code, text = _run(workspace, *stage)
            assert code == 0, text
        digests.append(digest_tree(workspace / "engines/int8_mixed", exclude=["manifest.json"]))
    assert digests[0] == digests[1]
