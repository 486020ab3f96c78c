"""Two processes give the bits of one; a rank that is lost ends the run."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import QuantizationError
from pipeline.params import Calib
from pipeline.quantize.ranks import Ranks, launch
from tests.unit.quantize import children


def _pair(checkpoint: Path, recipe: str, folder: Path, wait_s: float = 60.0, **faults: str) -> list[Any]:
    port = children.free_port()
    processes = [
        children.start(
            checkpoint, recipe, folder / f"rank{rank}", ranks=(rank, 2, port, wait_s), fault=faults.get(f"rank{rank}")
        )
        for rank in (0, 1)
    ]
    for process in processes:
        process.join(60)
        if process.is_alive():
            process.kill()
            process.join(10)
    return processes


@pytest.mark.parametrize("recipe", ["int8_max", "int8_sq", "fp8", "fp8_kv"])
def test_two_gloo_processes_give_the_bits_of_one(tiny_checkpoint: Path, tmp_path: Path, recipe: str) -> None:
    alone = children.start(tiny_checkpoint, recipe, tmp_path / "alone")
    pair = _pair(tiny_checkpoint, recipe, tmp_path)
    alone.join(60)
    assert [process.exitcode for process in (alone, *pair)] == [0, 0, 0]
    assert (tmp_path / "rank0").read_text() == (tmp_path / "alone").read_text()
    assert not (tmp_path / "rank1").exists()  # the first rank alone writes


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("fault", ["raises", "killed"])
def test_a_rank_that_dies_ends_the_run(tiny_checkpoint: Path, tmp_path: Path, lost: int, fault: str) -> None:
    pair = _pair(tiny_checkpoint, "int8_max", tmp_path, wait_s=20, **{f"rank{lost}": fault})
    assert pair[lost].exitcode == (1 if fault == "raises" else -signal.SIGKILL)
    assert pair[1 - lost].exitcode == QuantizationError.exit_code
    error = (tmp_path / f"rank{1 - lost}.error").read_text()
    assert f"rank {1 - lost} of 2: another rank is lost" in error
    assert "nothing was written, and the same command resumes" in error
    assert not any((tmp_path / f"rank{rank}").exists() for rank in (0, 1))


def test_a_rank_that_hangs_is_not_waited_for_longer_than_told(tiny_checkpoint: Path, tmp_path: Path) -> None:
    port = children.free_port()
    hangs = children.start(tiny_checkpoint, "int8_max", tmp_path / "rank1", ranks=(1, 2, port, 3.0), fault="hangs")
    waits = children.start(tiny_checkpoint, "int8_max", tmp_path / "rank0", ranks=(0, 2, port, 3.0))
    waits.join(30)
    hangs.kill()
    assert waits.exitcode == QuantizationError.exit_code
    assert "another rank is lost" in (tmp_path / "rank0.error").read_text()


def test_half_an_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert Ranks.from_environment(5.0) == Ranks(wait_s=5.0)
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert Ranks.from_environment(5.0) == Ranks(rank=5, size=8, local=1, here=4, wait_s=5.0)
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(QuantizationError, match="only half of RANK and WORLD_SIZE"):
        Ranks.from_environment(5.0)


def test_how_many_processes() -> None:
    assert [Calib().process_count(gpus) for gpus in (0, 1, 8)] == [1, 1, 8]
    assert Calib(processes=2).process_count(8) == 2
    assert Calib(device_map="auto").process_count(8) == 1
    with pytest.raises(ValueError, match="processes: must be 1 or auto with calib.device_map"):
        Calib(processes=2, device_map="auto")
    with pytest.raises(ValueError, match="batch_tokens: must be at least calib.max_tokens, or null"):
        Calib(batch_tokens=100)


def test_torchrun_that_fails_is_an_error_of_ours(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(QuantizationError, match="calibration with 2 processes ended with code 1"):
        launch(2, ["tests.unit.quantize.no_such_module"])
    assert "no_such_module" in capfd.readouterr().err
