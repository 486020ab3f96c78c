"""The command line of the baseline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import ServerError
from pipeline.params import Baseline
from pipeline.serving.process import ServerCommand
from pipeline.serving.vllm import vllm_command, vllm_dtype


def command(folder: Path, gpu: bool = False, **settings: Any) -> ServerCommand:
    binary = folder / "vllm"
    binary.touch(mode=0o755)
    baseline = Baseline(vllm=str(binary), **settings)
    return vllm_command(baseline, Path("ckpt"), name="baseline", model="toy", port=8123, max_tokens=512, gpu=gpu)


def test_on_a_cpu(tmp_path: Path) -> None:
    argv = " ".join(command(tmp_path).argv)
    assert argv.startswith(f"{tmp_path}/vllm serve {Path('ckpt').absolute()} --host 127.0.0.1 --port 8123 ")
    assert "--served-model-name toy --dtype float32 --max-model-len 512 --generation-config vllm" in argv
    assert argv.endswith("--enforce-eager")


def test_on_a_gpu(tmp_path: Path) -> None:
    argv = " ".join(command(tmp_path, gpu=True).argv)
    assert "--dtype float16" in argv
    assert "--enforce-eager" not in argv


def test_arguments_and_environment_of_the_user_come_last(tmp_path: Path) -> None:
    found = command(tmp_path, extra_args=("--max-num-seqs", "8"), env={"VLLM_NO_USAGE_STATS": "0", "X": "1"})
    assert found.argv[-2:] == ("--max-num-seqs", "8")
    assert found.env["VLLM_NO_USAGE_STATS"] == "0"
    assert found.env["X"] == "1"
    assert found.env["HF_HUB_OFFLINE"] == "1"


def test_a_dtype_that_is_named_is_kept() -> None:
    assert vllm_dtype(Baseline(dtype="bfloat16"), gpu=False) == "bfloat16"


def test_a_relative_path_and_a_name_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("./vllm", "vllm"):
        found = vllm_command(Baseline(vllm=name), Path("ckpt"), name="b", model="m", port=1, max_tokens=16, gpu=False)
        assert Path(found.argv[0]) == tmp_path / "vllm"


def test_vllm_that_is_not_installed_says_how_to_install_it() -> None:
    with pytest.raises(ServerError, match="vLLM is not installed") as raised:
        vllm_command(Baseline(vllm="no/such/vllm"), Path("c"), name="b", model="m", port=1, max_tokens=16, gpu=False)
    assert "make setup-vllm" in raised.value.next_step
