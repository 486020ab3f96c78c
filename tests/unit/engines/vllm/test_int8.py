"""INT8 for vLLM: the rewritten checkpoint computes what the export computes, tensor by tensor."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.engines.vllm.int8 import convert
from pipeline.errors import BuildError
from tests.emulation import emulate, read_tensors
from tests.unit.engines.vllm.models import PLAIN, SMOOTH, Quantized, quantized, samples


def converted(found: Quantized, target: Path) -> Path:
    target.mkdir(parents=True, exist_ok=True)
    convert(found.export, found.checkpoint, target)
    return target


def run(model: Any) -> tuple[Any, dict[str, Any]]:
    """Logits of two sequences, and the integers that entered each quantised layer."""
    import torch

    logits, integers = [], []
    for ids in samples()[:2]:
        with torch.inference_mode():
            logits.append(model(torch.tensor([ids])).logits[0].double())
        integers.append(
            {name: module.integers for name, module in model.named_modules() if hasattr(module, "integers")}
        )
    return torch.cat(logits), {name: torch.cat([one[name][0] for one in integers]) for name in integers[0]}


def assert_same(one: Any, other: Any, layers: int) -> None:
    """Equal integers into every layer and equal logits, but for float32's rounding of the folded factors."""
    (logits, integers), (expected, expected_integers) = run(one), run(other)
    assert integers.keys() == expected_integers.keys()
    assert len(integers) == layers
    for name, value in integers.items():
        different = (value != expected_integers[name]).double().mean()
        assert different < 1e-3, name  # a value on the edge between two integers
        assert (value - expected_integers[name]).abs().max() <= 1, name
        assert value.abs().max() > 60, name  # the comparison is of something
    assert (logits - expected).abs().max() < 1e-2 * expected.std()


@pytest.fixture(scope="module")
def smooth(tmp_path_factory: pytest.TempPathFactory) -> Quantized:
    return quantized(tmp_path_factory.mktemp("smooth"), SMOOTH)


def test_smoothquant_is_folded_without_changing_a_result(smooth: Quantized, tmp_path: Path) -> None:
    target = converted(smooth, tmp_path)
    before, after = read_tensors(smooth.export), read_tensors(target)
    assert any(name.endswith("pre_quant_scale") for name in before)
    assert not any(name.endswith("pre_quant_scale") for name in after)
    assert {name for name in before if not name.endswith("pre_quant_scale")} == set(after)
    for name, value in before.items():
        if value.dtype.is_floating_point or name not in after:
            continue
        assert value.equal(after[name]), name  # integers are the same bytes
    assert_same(emulate(target), emulate(smooth.export), layers=14)


def test_the_emulation_is_modelopts_own_model(smooth: Quantized) -> None:
    """The reference of these tests against ModelOpt's fake quantisation; the original is 20 times farther from it."""
    import torch
    from transformers import AutoModelForCausalLM

    logits, _ = run(emulate(smooth.export))
    original = AutoModelForCausalLM.from_pretrained(smooth.checkpoint, dtype=torch.float32)
    unquantized, _ = run(original.eval())
    near, far = (float((one - smooth.logits).abs().mean()) for one in (logits, unquantized))
    assert near < far / 20


@pytest.mark.parametrize(
    ("kind", "exclude", "layers"),
    [
        ("Llama", ("*mlp.down_proj",), 12),
        ("Llama", ("*mlp.up_proj", "*mlp.gate_proj"), 10),  # down's factors go into rows that are not quantised
        ("Llama", ("*q_proj", "*k_proj", "*v_proj"), 8),
        ("Llama", ("*layers.0.*",), 7),
        ("Qwen2", (), 14),  # q, k and v have biases
        ("Qwen2", ("*q_proj", "*k_proj", "*v_proj"), 8),  # o's factors go into v's plain rows and bias
        ("Qwen3", (), 14),  # norms of q and k between projection and attention
        ("Mistral", (), 14),
    ],
)
def test_families_and_recipes(tmp_path: Path, kind: str, exclude: tuple[str, ...], layers: int) -> None:
    found = quantized(tmp_path, replace(SMOOTH, exclude=exclude), kind)
    target = converted(found, tmp_path / "out")
    assert_same(emulate(target), emulate(found.export), layers)
    ignore = json.loads((target / "config.json").read_text())["quantization_config"]["ignore"]
    assert "lm_head" in ignore
    assert sum("proj" in path for path in ignore) == 14 - layers


def test_plain_maxima_need_no_folding(tmp_path: Path) -> None:
    found = quantized(tmp_path, PLAIN, num_key_value_heads=2)
    assert_same(emulate(converted(found, tmp_path / "out")), emulate(found.export), layers=14)


def test_heads_that_share_a_row_of_v(tmp_path: Path) -> None:
    """With grouped-query attention: what SmoothQuant gives when channels must share a factor.

    The expected factor is one over the largest input that any of the sharing channels saw (alpha 1), read with plain
    hooks on the original model; the expected weights are quantised here from the original's, as ModelOpt does.
    """
    import torch
    from transformers import AutoModelForCausalLM

    found = quantized(tmp_path, SMOOTH, num_key_value_heads=2)
    target = converted(found, tmp_path / "out")
    original = AutoModelForCausalLM.from_pretrained(found.checkpoint, dtype=torch.float32).eval()
    expected = read_tensors(found.export)
    for layer in (0, 1):
        path = f"model.layers.{layer}.self_attn.o_proj"
        module, seen = original.get_submodule(path), torch.zeros(64)
        handle = module.register_forward_pre_hook(
            lambda _, inputs, seen=seen: seen.copy_(torch.maximum(seen, inputs[0].abs().amax(dim=(0, 1))))
        )
        with torch.inference_mode():
            for ids in samples():
                original(torch.tensor([ids]))
        handle.remove()
        # heads 0 and 1 read key-value head 0, heads 2 and 3 read 1; 16 channels a head
        shared = torch.stack([seen[:16], seen[16:32], seen[32:48], seen[48:]])
        shared = torch.cat([shared[:2].amax(0), shared[:2].amax(0), shared[2:].amax(0), shared[2:].amax(0)])
        smoothed = module.weight.detach() * shared
        scale = smoothed.abs().amax(dim=1) / 127
        expected |= {
            f"{path}.pre_quant_scale": 1 / shared,
            f"{path}.weight": torch.round(smoothed / scale[:, None]).to(torch.int8),
            f"{path}.weight_scale": scale,
        }
    assert_same(emulate(target), emulate(found.export, expected), layers=14)


def test_shards_keep_their_index(tmp_path: Path) -> None:
    found = quantized(tmp_path, SMOOTH, shard="30KB")
    target = converted(found, tmp_path / "out")
    index = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 1
    assert set(index) == set(read_tensors(target))
    for name, shard in index.items():
        assert name in read_tensors_of(target / shard)
    assert_same(emulate(target), emulate(found.export), layers=14)


def read_tensors_of(path: Path) -> set[str]:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return set(file.keys())


def test_the_config_is_what_compressed_tensors_reads(smooth: Quantized, tmp_path: Path) -> None:
    from compressed_tensors.quantization import QuantizationConfig

    config = json.loads((converted(smooth, tmp_path) / "config.json").read_text())["quantization_config"]
    parsed = QuantizationConfig.model_validate(config)
    scheme = parsed.config_groups["group_0"]
    assert (scheme.weights.num_bits, scheme.weights.strategy, scheme.weights.symmetric) == (8, "channel", True)
    assert (scheme.input_activations.strategy, scheme.input_activations.dynamic) == ("tensor", False)
    for name, value in read_tensors(tmp_path).items():
        if name.endswith("weight_scale"):
            assert value.dim() == 2
            assert value.shape[1] == 1
        if name.endswith("input_scale"):
            assert value.shape == (1,)


def test_a_family_that_the_folding_does_not_know(smooth: Quantized, tmp_path: Path) -> None:
    export = shutil.copytree(smooth.export, tmp_path / "export")
    config = json.loads((export / "config.json").read_text())
    (export / "config.json").write_text(json.dumps(config | {"model_type": "phi3"}))
    with pytest.raises(BuildError, match="type 'phi3'") as raised:
        convert(export, smooth.checkpoint, tmp_path)
    assert "int8_max" in raised.value.next_step


@pytest.mark.parametrize("algorithm", ["smoothquant", "max"])
def test_half_a_merged_layer_is_refused(tmp_path: Path, algorithm: Any) -> None:
    found = quantized(tmp_path, replace(SMOOTH, algorithm=algorithm, exclude=("*layers.1.self_attn.k_proj",)))
    with pytest.raises(BuildError, match=r"layers\.1\.self_attn\.q_proj is quantised but .*k_proj is not"):
        converted(found, tmp_path / "out")


def test_factors_that_differ_within_a_group_are_refused(smooth: Quantized, tmp_path: Path) -> None:
    export = shutil.copytree(smooth.export, tmp_path / "export")
    change(export, "model.layers.1.mlp.up_proj.pre_quant_scale", 2.0)
    with pytest.raises(BuildError, match=r"gate_proj, .*up_proj read one input"):
        convert(export, smooth.checkpoint, tmp_path)


def test_factors_too_large_for_float16_are_refused(smooth: Quantized, tmp_path: Path) -> None:
    export = shutil.copytree(smooth.export, tmp_path / "export")
    for name in ("gate", "up"):
        change(export, f"model.layers.1.mlp.{name}_proj.pre_quant_scale", 1e6)
    with pytest.raises(BuildError, match=r"layers\.1\.post_attention_layernorm\.weight: .* too much for float16"):
        convert(export, smooth.checkpoint, tmp_path)


def test_another_checkpoint_is_refused(tmp_path: Path) -> None:
    found = quantized(tmp_path, SMOOTH, num_key_value_heads=2)
    change(found.checkpoint, "model.layers.1.self_attn.o_proj.weight", 1.5)
    with pytest.raises(BuildError, match=r"layers\.1\.self_attn\.o_proj: the export is not of this checkpoint"):
        converted(found, tmp_path / "out")


def test_fp8_weights_are_refused(smooth: Quantized, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    tensors = read_tensors(smooth.export)
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].to(torch.float8_e4m3fn)
    export = shutil.copytree(smooth.export, tmp_path / "export")
    save_file(tensors, export / "model.safetensors")
    with pytest.raises(BuildError, match="float8_e4m3fn, not int8"):
        convert(export, smooth.checkpoint, tmp_path)


def change(folder: Path, name: str, factor: float) -> None:
    """Multiplies one tensor of a folder."""
    from safetensors.torch import save_file

    tensors = read_tensors(folder)
    tensors[name] = tensors[name] * factor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
