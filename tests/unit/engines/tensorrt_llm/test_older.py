"""Folders that transformers 4 reads, memory that is there, and command lines of a container."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from pipeline.engines.tensorrt_llm.memory import cache_bytes_per_token, check_memory
from pipeline.engines.tensorrt_llm.older import older_config, older_tokenizer_config, write_tokenizer
from pipeline.engines.tensorrt_llm.runtime import PACKAGE, answer_of, explain_code, open_runtime
from pipeline.errors import BuildError
from pipeline.files import read_json
from pipeline.params import Engine, TensorRTLLM


def test_rotary_parameters_get_their_older_names() -> None:
    """transformers 4 would take a base of 10000 for this model, which has 500000."""
    llama3 = {"rope_theta": 500000.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    found = older_config({"rope_parameters": llama3, "dtype": "bfloat16"})
    assert found["rope_theta"] == 500000.0
    assert found["rope_scaling"] == {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    assert found["torch_dtype"] == "bfloat16"
    assert found["rope_parameters"] == llama3, "the newer names stay"
    assert older_config({"rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}})["rope_scaling"] is None
    assert older_config({"rope_theta": 3.0})["rope_theta"] == 3.0
    with pytest.raises(BuildError, match="several rotary embeddings"):
        older_config({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}})


def test_a_tokenizer_gets_its_older_class(tmp_path: Path, tiny_checkpoint: Path) -> None:
    assert read_json(tiny_checkpoint / "tokenizer_config.json")["tokenizer_class"] == "TokenizersBackend"
    write_tokenizer(tiny_checkpoint, tmp_path / "tokenizer")
    config = read_json(tmp_path / "tokenizer/tokenizer_config.json")
    assert (config["tokenizer_class"], config["eos_token"]) == ("PreTrainedTokenizerFast", "</s>")
    assert "backend" not in config
    assert not list((tmp_path / "tokenizer").glob("*.safetensors"))
    listed = older_tokenizer_config({"extra_special_tokens": ["<a>"], "tokenizer_class": "LlamaTokenizerFast"})
    assert listed == {"additional_special_tokens": ["<a>"], "tokenizer_class": "LlamaTokenizerFast"}
    from transformers import AutoTokenizer

    older = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    newer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    text = "translate a1 a2 =>"
    assert older(text)["input_ids"] == newer(text)["input_ids"]


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


def test_a_container_is_a_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = "docker run --rm --user {uid}:{gid} -v {project}:{project} 'image with space'"
    runtime = open_runtime(TensorRTLLM(container=text, env={"FORCE_DETERMINISTIC": "1"}))
    command = runtime.command("trtllm-serve", "engine")
    user = f"{os.getuid()}:{os.getgid()}"
    assert command[:8] == ("docker", "run", "--rm", "--user", user, "-v", f"{tmp_path}:{tmp_path}", "image with space")
    assert command[8] == "env"
    assert {"FORCE_DETERMINISTIC=1", "HF_HUB_OFFLINE=1"} <= set(command)
    assert command[-2:] == ("trtllm-serve", "engine")
    worker = runtime.worker("look")
    assert (worker[-3], worker[-1]) == ("python3", "look")
    folder = Path(worker[-2])
    assert folder.is_relative_to(tmp_path), "inside what the container mounts"
    assert (folder / PACKAGE / "convert.py").is_file()


def test_answers_of_the_worker() -> None:
    noisy = '[TensorRT-LLM] TensorRT-LLM version: 1.2.1\nenginegate-worker: {"a": 1}\nbye\n'
    assert answer_of(noisy, 0, noisy, "there") == {"a": 1}
    refused = 'enginegate-worker: {"message": "no", "next_step": "yes"}\n'
    with pytest.raises(BuildError, match="no") as error:
        answer_of(refused, 3, refused, "there")
    assert error.value.next_step == "yes"
    with pytest.raises(BuildError, match="exit code 1:\n  . ModuleNotFoundError: torch"):
        answer_of("", 1, "ModuleNotFoundError: torch\n", "there")
    with pytest.raises(BuildError, match="exit code 0"):
        answer_of("nothing", 0, "nothing", "there")
    assert "memory" in explain_code(137)
    assert "memory" in explain_code(-9)
    assert explain_code(1) == "exit code 1"
