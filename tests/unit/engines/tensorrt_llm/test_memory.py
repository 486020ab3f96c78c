"""What fits is built: figures by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.engines.tensorrt_llm.memory import cache_bytes_per_token, check_memory
from pipeline.errors import BuildError
from pipeline.params import Engine

CONFIG: dict[str, Any] = {  # Llama-3-8B: 32 layers, 8 heads of K and V, 128 values each
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "head_size": 128,
    "mapping": {"tp_size": 1},
    "quantization": {"kv_cache_quant_algo": None},
}
GIB = 2**30


def test_bytes_of_a_cached_token() -> None:
    assert cache_bytes_per_token(CONFIG) == 128 * 1024  # the usual figure for this model in FP16
    assert cache_bytes_per_token(CONFIG | {"quantization": {"kv_cache_quant_algo": "FP8"}}) == 64 * 1024
    assert cache_bytes_per_token(CONFIG | {"mapping": {"tp_size": 4}}) == 32 * 1024


def check(tmp_path: Path, *, weights_gib: float, free_gib: float, host_gib: float, max_tokens: int = 2048) -> Any:
    path = tmp_path / "rank0.safetensors"
    with path.open("wb") as file:
        file.truncate(int(weights_gib * GIB))  # a hole in a file takes no disk
    engine = Engine(backend="tensorrt_llm", max_tokens=max_tokens)
    found = {"gpus": [{"memory_free_mib": int(free_gib * 1024)}]}
    return check_memory([path], CONFIG, engine, found, int(host_gib * GIB))


def test_memory(tmp_path: Path) -> None:
    fits = check(tmp_path, weights_gib=8, free_gib=18, host_gib=16)
    assert fits["kv_cache_tokens"] == 9 * 8192  # 90 % of 10 GiB, 128 KiB a token
    with pytest.raises(BuildError, match="twice on the host, 16.0 GiB, of which 15.0 are available"):
        check(tmp_path, weights_gib=8, free_gib=18, host_gib=15)
    with pytest.raises(BuildError, match="take 8.0 GiB of GPU memory, of which 7.0 are free"):
        check(tmp_path, weights_gib=8, free_gib=7, host_gib=64)
    # 1 GiB holds 8192 tokens; 90 % of it 7372
    with pytest.raises(BuildError, match="holds 7372 tokens of KV cache; a request may need 8192"):
        check(tmp_path, weights_gib=8, free_gib=9, host_gib=64, max_tokens=8192)
