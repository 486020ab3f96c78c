"""A calibration killed at any moment resumes to the same bits, and never from the state of another input."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.errors import InputError
from pipeline.quantize.resume import Resume, Saved
from tests.unit.quantize import children


def _finished(process: Any, out: Path) -> tuple[str, int, int]:
    process.join(60)
    assert process.exitcode == 0
    found, resumed, batches = out.read_text().split()
    return found, int(resumed), int(batches)


def _killed(out: Path, *arguments: Any, **options: Any) -> None:
    process = children.start(*arguments, **options)
    _stopped(process, out)
    os.kill(process.pid, signal.SIGKILL)
    process.join(10)
    assert process.exitcode == -signal.SIGKILL
    out.unlink()


def _stopped(process: Any, out: Path) -> None:
    end = time.monotonic() + 60
    while not out.exists():
        assert process.is_alive(), f"ended with {process.exitcode} before the moment to kill it"
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("recipe", ["int8_sq", "fp8_kv"])
def test_killed_at_several_points_it_resumes_to_the_same_digest(
    tiny_checkpoint: Path, tmp_path: Path, recipe: str
) -> None:
    out, state = tmp_path / "out", tmp_path / "state"
    whole, _, batches = _finished(children.start(tiny_checkpoint, recipe, out), out)
    out.unlink()
    assert batches > 8
    # After the first batch before anything is saved, after three saved ones, before the seventh is written.
    for stop in ((1, True), (3, False), (7, True)):
        _killed(out, tiny_checkpoint, recipe, out, state, stop=stop)
    assert _finished(children.start(tiny_checkpoint, recipe, out, state), out) == (whole, 6, batches)
    assert not list(state.rglob("*.part"))


def test_a_state_of_two_ranks_is_finished_by_one(tiny_checkpoint: Path, tmp_path: Path) -> None:
    out, state = tmp_path / "out", tmp_path / "state"
    whole, _, _ = _finished(children.start(tiny_checkpoint, "int8_sq", out), out)
    out.unlink()
    port = children.free_port()
    pair = [
        children.start(tiny_checkpoint, "int8_sq", tmp_path / f"rank{rank}", state, stop=(3, False), ranks=ranks)
        for rank, ranks in enumerate([(0, 2, port, 60.0), (1, 2, port, 60.0)])
    ]
    for rank, process in enumerate(pair):
        _stopped(process, tmp_path / f"rank{rank}")
    for process in pair:
        os.kill(process.pid, signal.SIGKILL)
        process.join(10)
    found, resumed, _ = _finished(children.start(tiny_checkpoint, "int8_sq", out, state), out)
    assert (found, resumed) == (whole, 6)


def test_a_state_of_another_checkpoint_is_not_taken(tiny_checkpoint: Path, tmp_path: Path) -> None:
    out, state = tmp_path / "out", tmp_path / "state"
    _killed(out, tiny_checkpoint, "int8_max", out, state, stop=(5, False))
    other = children.start(tiny_checkpoint, "int8_max", out, state, fingerprint="sha256:two")
    assert _finished(other, out)[1] == 0
    out.unlink()
    assert _finished(children.start(tiny_checkpoint, "int8_max", out, state), out)[1] == 5  # it is still there


def _saved(tmp_path: Path, **parts: Any) -> Resume:
    resume = Resume(tmp_path, "sha256:one")
    resume.identify(**{"samples": "a", "recipe": {"alpha": 1.0}} | parts)
    return resume


def test_what_is_saved_is_what_is_loaded_and_ranks_add_up(tmp_path: Path) -> None:
    resume = _saved(tmp_path)
    resume.save(0, Saved({"q": torch.tensor([1.0, 5.0])}, {"q", "w"}, {0, 2}, 64))
    resume.save(1, Saved({"q": torch.tensor([3.0, 2.0]), "k": torch.tensor(7.0).bfloat16()}, {"k"}, {1}, 32))
    found = resume.load()
    assert found.values["q"].tolist() == [3.0, 5.0]
    assert found.values["k"].dtype == torch.bfloat16
    assert (found.called, found.done, found.budget) == ({"q", "w", "k"}, {0, 1, 2}, 32)
    resume.clear()
    assert not tmp_path.exists()


@pytest.mark.parametrize("change", [{"samples": "b"}, {"recipe": {"alpha": 0.5}}, {"device": "cuda"}])
def test_another_input_has_another_place(tmp_path: Path, change: dict[str, Any]) -> None:
    _saved(tmp_path).save(0, Saved({}, set(), {0}))
    other = _saved(tmp_path, **change)
    assert other.load().done == set()
    assert other.others() == 1


def test_a_state_that_was_moved_is_refused(tmp_path: Path) -> None:
    first, second = _saved(tmp_path), _saved(tmp_path, samples="b")
    first.save(0, Saved({}, set(), {0}))
    first.place.rename(second.place)
    with pytest.raises(InputError, match=r"statistics of another input \(samples\)"):
        second.load()


def test_a_broken_state_is_named(tmp_path: Path) -> None:
    resume = _saved(tmp_path)
    resume.save(0, Saved({}, set(), {0}))
    path = resume.place / "rank-0.safetensors"
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(InputError, match=r"rank-0.safetensors: cannot be read"):
        resume.load()
