"""Calibrations in real processes of their own, that can be killed and that meet over gloo.

They are forked from a server that has imported ModelOpt once: a second each instead of ten.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import modelopt.torch.quantization  # noqa: F401 (for the server)
import torch
from transformers import AutoModelForCausalLM

from pipeline.errors import EnginegateError
from pipeline.quantize.batches import Samples
from pipeline.quantize.calibrate import quantize_model
from pipeline.quantize.ranks import Ranks
from pipeline.quantize.recipes import load_recipe
from pipeline.quantize.resume import Resume, Saved

BUDGET = 64


def samples() -> Samples:
    """Forty samples of 3 to 42 tokens."""
    draw = torch.Generator().manual_seed(11)
    return Samples([torch.randint(5, 85, (3 + place,), generator=draw).tolist() for place in range(40)])


def digest(model: Any) -> str:
    """Over every bit of every scale and weight."""
    found = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        found.update(name.encode() + value.contiguous().numpy().tobytes())
    return found.hexdigest()


class Stopping(Resume):
    """Saves after each batch and stands still for ever at one moment, so that it can be killed there."""

    stop_after: int | None = None
    before_writing = False
    signal_file: Path

    def save(self, rank: int, state: Saved) -> None:
        here = self.stop_after is not None and len(state.done) >= self.stop_after
        if here and self.before_writing:
            self._stand_still()
        super().save(rank, state)
        if here:
            self._stand_still()

    def _stand_still(self) -> None:
        self.signal_file.touch()
        time.sleep(600)


def calibrate(
    checkpoint: Path,
    recipe: str,
    out: Path,
    state: Path | None = None,
    *,
    stop: tuple[int, bool] | None = None,
    ranks: tuple[int, int, int, float] | None = None,
    fault: str | None = None,
    fingerprint: str = "sha256:one",
) -> None:
    """One process's calibration; writes ``out`` with the digest of the model, or what went wrong."""
    torch.set_num_threads(1)
    me = Ranks()
    if ranks is not None:
        rank, size, port, wait_s = ranks
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(size)}
        me = Ranks.from_environment(wait_s)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    resume = None
    if state is not None:
        resume = Stopping(state, fingerprint, every_s=0)
        resume.signal_file = out
        if stop is not None:
            resume.stop_after, resume.before_writing = stop
    if fault is not None:
        _break(model, fault, after=4)
    try:
        outcome = quantize_model(model, load_recipe(recipe), samples(), BUDGET, resume=resume, ranks=me)
    except EnginegateError as error:
        out.with_suffix(".error").write_text(str(error))
        raise SystemExit(error.exit_code) from error
    if outcome is not None:
        assert outcome.never_called == []
        out.write_text(f"{digest(model)} {outcome.resumed_batches} {outcome.batches}")


def _break(model: Any, fault: str, after: int) -> None:
    calls = 0

    def hook(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls <= after + 6:  # the packing check runs six passes before the first batch
            return
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "hangs":
            time.sleep(600)
        raise RuntimeError("a fault of this test")

    model.get_input_embeddings().register_forward_pre_hook(hook)


_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.unit.quantize.children"])


def start(*arguments: Any, **options: Any) -> Any:
    """Starts ``calibrate`` in a process of its own."""
    process = _context.Process(target=calibrate, args=arguments, kwargs=options, daemon=True)
    process.start()
    return process


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
