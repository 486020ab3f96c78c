"""The server of an arm, by the arm's name: vLLM for ``baseline``, ``enginegate serve`` for an engine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.params import Params
from pipeline.serving.process import Server, ServerCommand, choose_port, running, started
from pipeline.serving.vllm import vllm_command

CHECKPOINT = Path("artifacts/checkpoint")
ENGINES = Path("engines")
LOGS = Path("logs")
MODEL = "checkpoint"  # the name under which vLLM serves it
ENGINE_START_S = 600


@contextmanager
def serving(name: str, params: Params, gpu: bool) -> Iterator[Server]:
    """Runs the server of arm ``name`` for the length of the block; its log stays in ``logs/NAME.log``.

    Raises ServerError as ``process.started`` does.
    """
    if name == "baseline":
        with _baseline(params, gpu) as server:
            yield server
        return
    port = choose_port()
    argv = (sys.executable, "-m", "pipeline.cli", "serve", str(ENGINES / name), "--port", str(port))
    with started(ServerCommand(name, argv, port), LOGS / f"{name}.log", ENGINE_START_S) as server:
        yield server


@contextmanager
def _baseline(params: Params, gpu: bool) -> Iterator[Server]:
    baseline, limit = params.baseline, params.engine.max_tokens
    if baseline.url is not None:
        with running(baseline.url, "baseline") as server:
            yield server
        return
    command = vllm_command(
        baseline, CHECKPOINT, name="baseline", model=MODEL, port=choose_port(), max_tokens=limit, gpu=gpu
    )
    with started(command, LOGS / "baseline.log", baseline.start_timeout_s) as server:
        yield server
