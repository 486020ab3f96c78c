"""``enginegate fit`` against calculations by hand, and against what vLLM itself said on a GPU."""

from __future__ import annotations

import json
import shutil
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint.shapes import read_config, read_shapes
from pipeline.cli import main
from pipeline.errors import CheckpointError, UsageError
from pipeline.fit import GIB, GPUS, Architecture, Asked, Gpu, Setting, fit, weight_bytes
from pipeline.quantize.recipes import Recipe

ROOT = Path(__file__).parents[2]
INT8 = Recipe(description="int8", weights="int8", activations="int8", algorithm="max")
FP8 = Recipe(description="fp8", weights="fp8", activations="fp8", algorithm="max", min_sm=89)
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000}
# https://huggingface.co/meta-llama: the published shapes of Llama 2
LLAMA_7B = LLAMA | {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
}
LLAMA_13B = LLAMA | {
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 40,
}
LLAMA_70B = LLAMA | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
CARD = Gpu("24 GiB", 24 * GIB, 89)


def folder(path: Path, config: dict[str, Any]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def llama_13b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("llama") / "13b", LLAMA_13B)


def test_llama_2_13b_by_hand(llama_13b: Path) -> None:
    shapes, model = read_shapes(llama_13b), Architecture.of(read_config(llama_13b))
    # a block: 4 h^2 + 3 h m + 2 h; then two embeddings v h and the last norm
    block = 4 * 5120**2 + 3 * 5120 * 13824 + 2 * 5120
    parameters = 40 * block + 2 * 32000 * 5120 + 5120
    assert parameters == 13_015_864_320
    assert weight_bytes(shapes, None, model) == 2 * parameters
    assert model.kv_bytes(2) == 2 * 40 * 5120 * 2 == 819_200
    # 8 bit: the matrices of the blocks; embeddings, head and norms stay in 16 bit; a float32 scale an output channel
    matrices = 40 * (4 * 5120**2 + 3 * 5120 * 13824)
    channels = 40 * (5 * 5120 + 2 * 13824)
    assert weight_bytes(shapes, INT8, model) == matrices + 4 * channels + 2 * (parameters - matrices)
    assert weight_bytes(shapes, FP8, model) == matrices + 2 * (parameters - matrices)
    mixed = replace(INT8, exclude=("*mlp.down_proj",))
    assert weight_bytes(shapes, mixed, model) - weight_bytes(shapes, INT8, model) == 40 * (5120 * 13824 - 4 * 5120)


def test_int4_and_an_fp8_cache(llama_13b: Path) -> None:
    shapes, model = read_shapes(llama_13b), Architecture.of(read_config(llama_13b))
    matrices = 40 * (4 * 5120**2 + 3 * 5120 * 13824)
    int4 = Recipe(description="awq", weights="int4", activations="none", algorithm="awq")
    rest = 2 * (13_015_864_320 - matrices)
    assert weight_bytes(shapes, int4, model) == matrices // 2 + matrices // 128 * 2 + rest  # a 16-bit scale for 128
    only = replace(int4, include=("*mlp*",))
    assert weight_bytes(shapes, only, model) == 40 * 3 * 5120 * 13824 * (0.5 + 2 / 128) + rest + 2 * 40 * 4 * 5120**2
    small = fit("x", replace(FP8, kv_cache="fp8"), shapes, model, Setting(CARD, Asked(2048, 4)))
    assert small.kv_per_token == 409_600


def test_13b_on_24_gb(llama_13b: Path) -> None:
    """16 bit needs 24.2 GiB for weights alone; in 8 bit about 7 GiB are left: some 9 000 tokens at 800 KiB."""
    shapes, model = read_shapes(llama_13b), Architecture.of(read_config(llama_13b))
    setting = Setting(CARD, Asked(tokens=2048, sequences=4))
    plain, small = (fit("x", recipe, shapes, model, setting) for recipe in (None, INT8))
    assert not plain.fits
    assert plain.weights / GIB == pytest.approx(24.24, abs=0.01)
    assert (plain.left < 0, plain.kv_tokens, plain.sequences) == (True, 0, 0)
    assert "of 21.6" in plain.why_not
    assert small.fits
    # 24 * 0.9 - 12.44 - 1 (runtime) - activations: 8192 * (3 * 13824 + 2 * 5120) * 2 + 4 * 32000 * 8 bytes
    activations = 8192 * (3 * 13824 + 2 * 5120) * 2 + 4 * 32000 * 8
    left = int(24 * GIB * 0.9) - small.weights - GIB - activations
    assert (small.activations, small.left) == (activations, left)
    assert small.kv_tokens == left // 819_200 // 16 * 16
    assert small.sequences == small.kv_tokens // 2048 == 4
    five = fit("x", INT8, shapes, model, Setting(CARD, Asked(tokens=2048, sequences=5)))
    assert five.why_not == "the cache holds 4 of 5 requests"


def test_sharded_over_two(llama_13b: Path) -> None:
    shapes, model = read_shapes(llama_13b), Architecture.of(read_config(llama_13b))
    one, two = (fit("x", None, shapes, model, Setting(CARD, Asked(2048, 4, gpus))) for gpus in (1, 2))
    vectors = (2 * 40 + 1) * 5120 * 2  # norms are on both
    assert two.weights == (one.weights - vectors) // 2 + vectors
    assert two.kv_per_token == 409_600
    assert two.runtime - one.runtime == GIB // 2
    assert two.fits
    with pytest.raises(UsageError, match="40 attention heads"):
        fit("x", None, shapes, model, Setting(CARD, Asked(2048, 4, gpus=3)))


def test_grouped_heads_and_more_gpus_than_heads() -> None:
    model = Architecture.of(LLAMA_70B)
    assert model.kv_bytes(2) == 2 * 80 * 8 * 128 * 2 == 327_680
    assert [model.kv_bytes(2, gpus) for gpus in (2, 8, 16)] == [163_840, 40_960, 40_960]  # a head at least
    assert model.kv_bytes(1) == 163_840


def test_what_vllm_said_on_an_h200(tmp_path: Path) -> None:
    """vLLM 0.25.0 with this shape: "Model loading took 12.55 GiB" (FP16), 6.31 GiB on each of two GPUs, 6.58 GiB (FP8),
    6.56 GiB (INT8); "GPU KV cache size: 69,632 tokens" for 34 GiB."""
    path = folder(tmp_path / "7b", LLAMA_7B | {"head_dim": 128})
    shapes, model = read_shapes(path), Architecture.of(read_config(path))
    sizes = {"fp16": (None, 1), "tp2": (None, 2), "fp8": (FP8, 1), "int8": (INT8, 1)}
    found = {name: weight_bytes(shapes, recipe, model, gpus) / GIB for name, (recipe, gpus) in sizes.items()}
    assert found["fp16"] == pytest.approx(12.55, abs=0.005)
    assert found["tp2"] == pytest.approx(6.31, rel=0.01)
    assert found["fp8"] == pytest.approx(6.58, rel=0.01)
    assert found["int8"] == pytest.approx(6.56, rel=0.01)
    assert 34 * GIB // model.kv_bytes(2) == 69_632


def test_headers_give_what_the_model_has(tiny_checkpoint: Path, tiny_model: Any, tmp_path: Path) -> None:
    assert read_shapes(tiny_checkpoint) == {name: tuple(p.shape) for name, p in tiny_model.named_parameters()}
    shutil.copy(tiny_checkpoint / "config.json", tmp_path)
    assert read_shapes(tmp_path) == read_shapes(tiny_checkpoint)  # from the config alone


def test_a_tied_head_counts_once() -> None:
    model = Architecture.of(LLAMA_7B | {"tie_word_embeddings": True})
    shapes = {"model.embed_tokens.weight": (32000, 4096), "lm_head.weight": (32000, 4096)}
    assert weight_bytes(shapes, INT8, model) == 2 * 32000 * 4096
    assert weight_bytes(shapes, INT8, replace(model, tied=False)) == 2 * 2 * 32000 * 4096  # the head is never quantised


def test_a_compressed_cache() -> None:
    """DeepSeek-V2-Lite: 27 layers of 512 + 64 values a token, the same on every GPU."""
    config = LLAMA_7B | {"num_hidden_layers": 27, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert Architecture.of(config).kv_bytes(2, gpus=4) == 27 * 576 * 2


def test_layers_without_keys_and_values_are_refused() -> None:
    with pytest.raises(CheckpointError, match="linear_attention keep another cache"):
        Architecture.of(LLAMA_7B | {"layer_types": ["full_attention", "linear_attention"]})


def test_a_config_that_says_too_little() -> None:
    with pytest.raises(CheckpointError, match="no vocab_size"):
        Architecture.of({key: value for key, value in LLAMA_7B.items() if key != "vocab_size"})


@pytest.mark.parametrize("content", [b"", b"\x10", struct.pack("<Q", 10**9), struct.pack("<Q", 4) + b"{{{{"])
def test_a_broken_header(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a safetensors file"):
        read_shapes(tmp_path)


def test_an_old_gpu_has_no_kernels(llama_13b: Path) -> None:
    shapes, model = read_shapes(llama_13b), Architecture.of(read_config(llama_13b))
    found = fit("fp8", FP8, shapes, model, Setting(GPUS["a100-80"], Asked(2048, 4)))
    assert found.why_not == "needs SM 89, this is 80"
    old = fit("x", replace(INT8, min_sm=75, max_sm=90), shapes, model, Setting(GPUS["b200"], Asked(2048, 4)))
    assert old.why_not == "needs SM 75 to 90, this is 100"


@pytest.fixture
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.usefixtures("in_the_repository")
def test_the_command(llama_13b: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["fit", str(llama_13b), "--gpu", "RTX4090", "--tokens", "2048", "--sequences", "4"]
    assert main([*base, "--recipe", "fp16", "int8_sq"]) == 1
    out = capsys.readouterr().out
    assert "13.02e9 parameters on rtx4090 (24.0 GiB, SM 89); asked: 4 requests of 2048 tokens" in out
    assert "no: weights and overhead need 26.0 GiB of 21.6" in out
    assert "Assumed: 90% of the memory" in out
    assert main([*base, "--recipe", "int8_sq", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == 13_015_864_320
    assert found["recipes"]["int8_sq"]["kv_per_token"] == 819_200
    assert found["asked"] == {"tokens": 2048, "sequences": 4, "gpus": 1}
    assert main(["fit", "--gpu", "list"]) == 0
    assert "h200" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("--gpu rtx1", 64, "no GPU named 'rtx1'"),
        ("", 64, "give --gpu NAME or --memory-gib"),
        ("--gpu l4 --memory-gib 24", 64, "give --gpu NAME or --memory-gib"),
        ("--memory-gib 0", 64, "--memory-gib: must be more than 0"),
        ("--gpu l4 --tokens 0", 64, "must be at least 1"),
        ("--gpu l4 --utilisation 2", 64, "--utilisation"),
        ("--gpu l4 --recipe nothing", 78, "no such recipe"),
    ],
)
@pytest.mark.usefixtures("in_the_repository")
def test_mistakes(llama_13b: Path, capsys: pytest.CaptureFixture[str], words: str, code: int, message: str) -> None:
    assert main(["fit", str(llama_13b), *words.split()]) == code
    assert message in capsys.readouterr().err


def test_a_folder_that_is_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", str(tmp_path), "--gpu", "l4"]) == 65
    assert "no config.json" in capsys.readouterr().err
