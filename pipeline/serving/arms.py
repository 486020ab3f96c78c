"""The server of an arm, by the arm's name: vLLM for ``baseline``; for an engine, our own or its backend's program."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from pipeline.engines import ServerBackend, get_backend
from pipeline.engines.manifest import read_manifest
from pipeline.params import Params
from pipeline.serving.process import Server, ServerCommand, choose_port, running
from pipeline.serving.replicas import placed, replicated
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
    with replicated(engine_commands(name, params, gpu), LOGS, ENGINE_START_S) as server:
        yield server


def engine_commands(name: str, params: Params, gpu: bool) -> list[ServerCommand]:
    """The command lines that serve ``engines/NAME``: one for each of ``serving.replicas``, on GPUs of its own."""
    return placed([engine_command(name, params, gpu) for _ in range(params.serving.replicas)], params, gpu)


def engine_command(name: str, params: Params, gpu: bool) -> ServerCommand:
    """The command line that serves ``engines/NAME`` on a free port."""
    folder, port = ENGINES / name, choose_port()
    backend = get_backend(read_manifest(folder)["backend"])
    if isinstance(backend, ServerBackend):
        return backend.serve_command(folder, params, name=name, port=port, gpu=gpu)
    argv = (sys.executable, "-m", "pipeline.cli", "serve", str(folder), "--port", str(port))
    return ServerCommand(name, argv, port)


@contextmanager
def _baseline(params: Params, gpu: bool) -> Iterator[Server]:
    baseline, limit = params.baseline, params.engine.max_tokens
    if baseline.url is not None:
        with running(baseline.url, "baseline") as server:
            yield replace(server, gpus=baseline.tensor_parallel_size)
        return
    command = vllm_command(
        baseline, CHECKPOINT, name="baseline", model=MODEL, port=choose_port(), max_tokens=limit, gpu=gpu
    )
    with replicated(placed([command], params, gpu), LOGS, baseline.start_timeout_s) as server:
        yield server
