"""Whether an engine can fit before it is built: weights against the GPU's memory and the host's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.errors import BuildError
from pipeline.params import Engine

MIB = 2**20
# The weights, and the serialised engine that holds them again.
HOST_COPIES = 2
CACHE_BYTES = {"FP8": 1, "INT8": 1}  # a value of the KV cache; 2 in high precision


def check_memory(
    weights: list[Path], config: dict[str, Any], engine: Engine, found: dict[str, Any], host_bytes: int
) -> dict[str, int]:
    """Raises BuildError when the weights do not fit; returns the figures.

    ``weights``: one file a rank. ``config``: of a TensorRT-LLM checkpoint. ``found``: the worker's ``look``.
    ``host_bytes``: memory that the host has available. Only what cannot work is refused: a build needs workspace and
    activations too, how much is known when it has run (``peak_memory_mb`` in the manifest).
    """
    largest = max(path.stat().st_size for path in weights)
    at_once = largest * min(len(weights), len(found["gpus"]))
    if host_bytes < HOST_COPIES * at_once:
        raise BuildError(
            f"building holds the weights twice on the host, {HOST_COPIES * at_once / 2**30:.1f} GiB, "
            f"of which {host_bytes / 2**30:.1f} are available",
            "build on a machine with more memory, or end what uses it",
        )
    free = min(gpu["memory_free_mib"] for gpu in found["gpus"]) * MIB
    if free < largest:
        raise BuildError(
            f"the weights take {largest / 2**30:.1f} GiB of GPU memory, of which {free / 2**30:.1f} are free",
            "end what uses the GPU (nvidia-smi shows it), quantise, or raise engine.tensorrt_llm.tp",
        )
    token = cache_bytes_per_token(config)
    room = int((free - largest) * engine.tensorrt_llm.memory_fraction) // token
    if room < engine.max_tokens:
        raise BuildError(
            f"beside the weights the GPU holds {room} tokens of KV cache; a request may need {engine.max_tokens}",
            "lower engine.max_tokens, or raise engine.tensorrt_llm.tp",
        )
    return {"weights_bytes": largest, "kv_cache_tokens": room, "kv_cache_bytes_per_token": token}


def cache_bytes_per_token(config: dict[str, Any]) -> int:
    """Bytes of KV cache that a token takes on one GPU: K and V, for its share of heads, in every layer."""
    heads = config["num_key_value_heads"] // config["mapping"]["tp_size"]
    size = CACHE_BYTES.get(config["quantization"]["kv_cache_quant_algo"], 2)
    return int(2 * config["num_hidden_layers"] * heads * config["head_size"] * size)
