"""Several servers of one engine, each on GPUs of its own, behind the one client: replication instead of sharding."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from pipeline.errors import ServerError
from pipeline.launcher import launched
from pipeline.params import Params
from pipeline.serving.process import Server, ServerCommand, starting


@contextmanager
def replicated(commands: Sequence[ServerCommand], logs: Path, timeout_s: float) -> Iterator[Server]:
    """Runs all ``commands`` for the length of the block; they start together, and all are healthy when it begins.

    The result is the first server with the others. Logs are ``NAME.log``, ``NAME.2.log``, ... Raises
    ServerError as ``process.started`` does, with the last lines of every log.
    """
    with ExitStack() as stack:
        waits: list[Callable[[], Server]] = [
            stack.enter_context(starting(command, logs / log_name(command.name, place), timeout_s))
            for place, command in enumerate(commands)
        ]
        first, *others = [wait() for wait in waits]
        yield replace(first, others=tuple(others))


def log_name(name: str, place: int) -> str:
    """The log file of one replica."""
    return f"{name}.{place + 1}.log" if place else f"{name}.log"


def placed(commands: Sequence[ServerCommand], params: Params, gpu: bool) -> list[ServerCommand]:
    """The same command lines behind ``params.launcher``, or, without one, each on GPUs of its own.

    A launcher gives the GPUs itself; ``{gpus}`` in it becomes their numbers (``0,1``). One server alone keeps what
    CUDA_VISIBLE_DEVICES says. Raises ServerError when this machine has too few GPUs.
    """
    needed = sum(command.gpus for command in commands)
    if params.launcher:
        names = [str(number) for number in range(needed)]
    elif gpu and needed > 1:
        names = visible_gpus()
    else:
        return list(commands)
    if len(names) < needed:
        raise ServerError(
            f"{commands[0].name}: {len(commands)} server{'s' if len(commands) > 1 else ''} on {commands[0].gpus} "
            f"GPU{'s' if commands[0].gpus > 1 else ''} each need {needed}, here are {len(names)}",
            "lower serving.replicas or tensor_parallel_size in params.yaml, or widen CUDA_VISIBLE_DEVICES",
        )
    result = []
    for command in commands:
        gpus, names = ",".join(names[: command.gpus]), names[command.gpus :]
        if params.launcher:
            result.append(replace(command, argv=launched(command.argv, params, command.env, gpus)))
        else:
            result.append(replace(command, env={**command.env, "CUDA_VISIBLE_DEVICES": gpus}))
    return result


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, by number or by the names in CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip() not in ("", "-1")]
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, "--query-gpu=index", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.split() if done.returncode == 0 else []
