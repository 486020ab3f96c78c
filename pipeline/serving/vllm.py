"""``vllm serve`` as a command line: the baseline, from an environment of its own."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from pipeline.errors import ServerError
from pipeline.params import Baseline
from pipeline.serving.process import HOST, ServerCommand

# No usage reports and no look at the hub: the checkpoint is a local folder.
_ENV = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}


def vllm_dtype(baseline: Baseline, gpu: bool) -> str:
    """The dtype that is served: ``auto`` is float16 on a GPU and float32 on a CPU, which has no fast float16."""
    if baseline.dtype != "auto":
        return baseline.dtype
    return "float16" if gpu else "float32"


def vllm_command(
    baseline: Baseline, checkpoint: Path, *, name: str, model: str, port: int, max_tokens: int, gpu: bool
) -> ServerCommand:
    """Serves the folder ``checkpoint`` under the name ``model``, for at most ``max_tokens`` a request.

    Raises ServerError when vLLM is not installed where ``baseline.vllm`` says.
    """
    argv = [
        *(_binary(baseline), "serve", str(checkpoint.absolute())),
        *("--host", HOST, "--port", str(port), "--served-model-name", model),
        *("--dtype", vllm_dtype(baseline, gpu), "--max-model-len", str(max_tokens)),
        *("--generation-config", "vllm"),  # the checkpoint's own could add penalties to greedy decoding
        "--no-enable-prefix-caching",  # the repeat must compute again what the first pass computed
        "--disable-uvicorn-access-log",
    ]
    if baseline.tensor_parallel_size > 1:
        argv += ["--tensor-parallel-size", str(baseline.tensor_parallel_size)]
    if not gpu:
        argv.append("--enforce-eager")  # compiling takes a minute on two cores and gains a tenth
    env = {**_ENV, **baseline.env}
    return ServerCommand(name, (*argv, *baseline.extra_args), port, env, baseline.tensor_parallel_size)


def _binary(baseline: Baseline) -> str:
    path = Path(baseline.vllm)
    found = str(path.absolute()) if path.is_file() and os.access(path, os.X_OK) else shutil.which(baseline.vllm)
    if found is None:
        raise ServerError(
            f"{baseline.vllm}: vLLM is not installed there",
            "run `make setup-vllm`, or set baseline.vllm or baseline.url in params.yaml",
        )
    return found
