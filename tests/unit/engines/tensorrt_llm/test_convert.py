"""Our TensorRT-LLM checkpoint against the one that ModelOpt's own exporter writes, tensor by tensor.

ModelOpt's ``export_tensorrt_llm_checkpoint`` works from the live, calibrated model; ours from the unified export, as
every other backend does. Both run here, on tiny models of each family.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pipeline.engines.tensorrt_llm.documented import CHECKPOINT_CONFIG, MAPPING_FIELDS, QUANTIZATION_FIELDS, TENSORS
from pipeline.engines.tensorrt_llm.older import older_config
from pipeline.engines.tensorrt_llm.worker.convert import convert
from pipeline.engines.tensorrt_llm.worker.tensors import Folder, Refused, read_linear
from pipeline.files import read_json
from pipeline.quantize.calibrate import quantize_model
from pipeline.quantize.recipes import load_recipe
from tests.tiny import write_checkpoint

SAMPLES = [[*range(5, 12 + place % 3), 20 + place] for place in range(12)]
DECODERS = {"llama": "llama", "mistral": "llama", "qwen2": "qwen"}  # ModelOpt's words


@dataclass(frozen=True)
class Made:
    """A checkpoint, its unified export, and ModelOpt's TensorRT-LLM checkpoints by the number of ranks."""

    original: Path
    export: Path
    reference: dict[int, Path]

    @property
    def quantization(self) -> dict[str, Any]:
        path = self.export / "hf_quant_config.json"
        found: dict[str, Any] = read_json(path)["quantization"] if path.exists() else {}
        return found

    def ours(self, target: Path, tp: int, **changes: Any) -> dict[str, Any]:
        config = older_config(read_json(self.original / "config.json")) | changes
        return convert(
            self.export, self.original, config, target, quantization=self.quantization, dtype="float16", tp=tp
        )


def _load(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def _family(folder: Path, name: str) -> None:
    """A tiny untrained checkpoint. Untied, so that the logits head is a matrix of its own."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    config = AutoConfig.for_model(
        name,
        architectures=None,
        vocab_size=96,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=False,
        sliding_window=None,
    )
    AutoModelForCausalLM.from_config(config).eval().save_pretrained(folder)


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Made]:
    """Makes each checkpoint and export once."""
    root, made = tmp_path_factory.mktemp("convert"), {}

    def get(recipe: str | None, family: str = "llama", tps: tuple[int, ...] = (1, 2)) -> Made:
        import torch
        from modelopt.torch.export import export_hf_checkpoint, export_tensorrt_llm_checkpoint

        if (recipe, family) in made:
            return made[recipe, family]
        original = root / family
        if not original.exists():
            write_checkpoint(original) if family == "llama" else _family(original, family)
        model = _load(original)
        if recipe is not None:
            quantize_model(model, load_recipe(recipe), SAMPLES, 64)
        reference = {tp: root / f"{family}-{recipe}-tp{tp}" for tp in tps}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for tp, folder in reference.items():
                export_tensorrt_llm_checkpoint(
                    copy.deepcopy(model), DECODERS[family], torch.float16, folder, inference_tensor_parallel=tp
                )
            export = original
            if recipe is not None:
                export = root / f"{family}-{recipe}"
                export_hf_checkpoint(model, export_dir=str(export))
        made[recipe, family] = Made(original, export, reference)
        return made[recipe, family]

    return get


def assert_same(ours: Path, reference: Path, ranks: int) -> None:
    import torch
    from safetensors.torch import load_file

    for rank in range(ranks):
        got, wanted = load_file(ours / f"rank{rank}.safetensors"), load_file(reference / f"rank{rank}.safetensors")
        assert got.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert got[name].dtype == tensor.dtype, name
            assert got[name].shape == tensor.shape, name
            assert torch.equal(got[name].float(), tensor.float()), name


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("recipe", [None, "int8_sq", "int8_mixed", "fp8", "fp8_kv"])
def test_every_tensor_is_modelopts(recipe: str | None, tp: int, make: Callable[..., Made], tmp_path: Path) -> None:
    made = make(recipe)
    done = made.ours(tmp_path, tp)
    assert_same(tmp_path, made.reference[tp], tp)
    ours, theirs = read_json(tmp_path / "config.json"), read_json(made.reference[tp] / "config.json")
    # It reads the rotary base under the name that transformers 4 gave it, and transformers 5 is here: a base other
    # than the default would be lost. Ours also has what TensorRT-LLM's quantisation script adds afterwards.
    assert ours.keys() - theirs.keys() <= {"rotary_base", "rotary_scaling", "model_type"}
    quantization = [side["quantization"] for side in (ours, theirs)]
    for side in quantization:
        side["exclude_modules"] = sorted(side.get("exclude_modules", []))
        side.pop("group_size", None)  # written always: the documented defaults differ
    assert quantization[0] == quantization[1]
    same = theirs.keys() - {"producer", "quantization"}
    assert {key: ours[key] for key in same} == {key: theirs[key] for key in same}
    assert bool(done["requantised"]) == (recipe in ("fp8", "fp8_kv"))


@pytest.mark.parametrize("family", ["mistral", "qwen2"])
@pytest.mark.parametrize("recipe", ["int8_mixed", "fp8"])
def test_other_families(family: str, recipe: str, make: Callable[..., Made], tmp_path: Path) -> None:
    """Untied heads, and for Qwen2 biases of q, k and v; another rotary base."""
    made = make(recipe, family, (2,))
    made.ours(tmp_path, 2)
    assert_same(tmp_path, made.reference[2], 2)
    config = read_json(tmp_path / "config.json")
    assert config["rotary_base"] == 500000.0
    assert config.get("qwen_type") == (family if family == "qwen2" else None)
    assert config["architecture"] == {"mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}[family]


def test_int4_is_the_calibrated_model(make: Callable[..., Made], tmp_path: Path) -> None:
    """The unified export folds the scale of an input into the norm before it and shares one between gate and up, so
    not every tensor is the exporter's; the attention's products are, and every 4-bit code is the export's."""
    import torch
    from safetensors.torch import load_file

    made = make("w4a16_awq", tps=(1,))
    made.ours(tmp_path, 1)
    got = load_file(tmp_path / "rank0.safetensors")
    wanted = load_file(made.reference[1] / "rank0.safetensors")
    for layer in (0, 1):
        path = f"transformer.layers.{layer}"
        for part in ("weight", "weights_scaling_factor"):
            for linear in ("attention.qkv", "attention.dense", "mlp.proj"):
                assert torch.equal(got[f"{path}.{linear}.{part}"], wanted[f"{path}.{linear}.{part}"])
        folded = [
            side[f"{path}.input_layernorm.weight"] * side[f"{path}.attention.qkv.prequant_scaling_factor"]
            for side in (got, wanted)
        ]
        torch.testing.assert_close(folded[0], folded[1], rtol=2e-3, atol=0)  # two roundings to float16
        export = load_file(made.export / "model.safetensors")
        for theirs, ours in (("mlp.gate_proj", "mlp.fc"), ("mlp.up_proj", "mlp.gate")):
            codes = export[f"model.layers.{layer}.{theirs}.weight"].view(torch.int8)
            assert torch.equal(got[f"{path}.{ours}.weight"], codes)
    assert read_json(tmp_path / "config.json")["quantization"] == {
        "quant_algo": "W4A16_AWQ",
        "kv_cache_quant_algo": None,
        "group_size": 128,
        "has_zero_point": False,
        "pre_quant_scale": True,
        "exclude_modules": ["lm_head"],
    }


def test_every_name_that_is_written_is_documented(make: Callable[..., Made], tmp_path: Path) -> None:
    from safetensors import safe_open

    for recipe, family in ((None, "llama"), ("int8_mixed", "llama"), ("fp8_kv", "llama"), ("fp8", "qwen2")):
        made, target = make(recipe, family), tmp_path / f"{family}-{recipe}"
        made.ours(target, 1)
        config = read_json(target / "config.json")
        assert config.keys() <= CHECKPOINT_CONFIG
        assert config["mapping"].keys() <= MAPPING_FIELDS
        assert config["quantization"].keys() <= QUANTIZATION_FIELDS
        with safe_open(target / "rank0.safetensors", framework="pt") as file:
            names = {re.sub(r"layers\.\d+", "layers.N", name) for name in list(file.keys())}
        assert names <= TENSORS


def test_a_large_kv_scale_is_told(make: Callable[..., Made], tmp_path: Path) -> None:
    """Issue 4218 and others: ModelOpt warns above 0.5 that a quantised KV cache may cost accuracy."""
    from safetensors.torch import load_file

    made = _changed(make("fp8_kv"), tmp_path, {"model.layers.1.self_attn.v_proj.v_scale": lambda scale: scale * 0 + 2})
    done = made.ours(tmp_path / "out", 1)
    assert done["warnings"] == ["model.layers.1.self_attn: V reaches 896: an FP8 KV cache may cost accuracy"]
    tensors = load_file(tmp_path / "out/rank0.safetensors")
    scales = {
        name: float(tensors[f"transformer.layers.1.attention.{name}_cache_scaling_factor"]) for name in ("k", "v", "kv")
    }
    assert scales == {"k": 1.0, "v": 2.0, "kv": 2.0}


def _changed(made: Made, folder: Path, changes: dict[str, Callable[[Any], Any] | None]) -> Made:
    """A copy of the export with tensors changed, or removed."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(made.export / "model.safetensors")
    for name, change in changes.items():
        if change is None:
            tensors.pop(name)
        else:
            tensors[name] = change(tensors.get(name)).contiguous()
    target = folder / "export"
    target.mkdir()
    for path in made.export.glob("*.json"):
        (target / path.name).write_bytes(path.read_bytes())
    save_file(tensors, target / "model.safetensors")
    return Made(made.original, target, made.reference)


O_PROJ = "model.layers.1.self_attn.o_proj"


@pytest.mark.parametrize(
    ("recipe", "changes", "message"),
    [
        ("int8_sq", {f"{O_PROJ}.weight_scale": lambda s: s.max()}, "one INT8 scale for the whole weight"),  # 945
        ("int8_sq", {f"{O_PROJ}.weight_scale": lambda s: s * 0}, "scale holds zero, negative, NaN or infinite"),
        ("fp8", {f"{O_PROJ}.input_scale": lambda s: s / 0}, "input_scale holds zero, negative, NaN or infinite"),
        (
            "int8_sq",
            {"model.layers.0.self_attn.k_proj.pre_quant_scale": lambda s: s * 2},
            "scale one input in two ways",
        ),
        ("fp8_kv", {"model.layers.0.self_attn.k_proj.k_scale": None}, "only one of k_scale and v_scale"),
        ("fp8", {f"{O_PROJ}.weight": None}, f"no tensor {O_PROJ}.weight"),
    ],
)
def test_bad_exports_are_refused(
    recipe: str, changes: dict[str, Any], message: str, make: Callable[..., Made], tmp_path: Path
) -> None:
    with pytest.raises(Refused, match=message):
        _changed(make(recipe), tmp_path, changes).ours(tmp_path / "out", 1)


def test_tied_and_untied_heads(make: Callable[..., Made], tmp_path: Path) -> None:
    """Issues 1733, 1785, 2677, 3324: a head that is missing is silently tied by TensorRT-LLM, one too many ignored."""
    import torch

    tied, untied = make("int8_mixed"), make("int8_mixed", "qwen2", (2,))
    for folder in ("a", "b", "c"):
        (tmp_path / folder).mkdir()
    other = _changed(tied, tmp_path / "a", {"lm_head.weight": lambda _: torch.ones(85, 128)})
    with pytest.raises(Refused, match="differs from the embedding, but config.json ties them"):
        other.ours(tmp_path / "out", 1)
    with pytest.raises(Refused, match="config.json does not tie it"):
        _changed(untied, tmp_path / "b", {"lm_head.weight": None}).ours(tmp_path / "out", 1)


@pytest.mark.parametrize(
    ("changes", "tp", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, 1, "GPT2LMHeadModel: this backend writes .* of LlamaForCausalLM"),
        ({"sliding_window": 64}, 1, "sliding window of 64"),
        ({}, 4, "2 key-value heads cannot be cut into 4 parts"),
    ],
)
def test_models_without_a_place_are_refused(
    changes: dict[str, Any], tp: int, message: str, make: Callable[..., Made], tmp_path: Path
) -> None:
    with pytest.raises(Refused, match=message) as refused:
        make("int8_sq").ours(tmp_path, tp, **changes)
    assert refused.value.next_step


def test_a_recipe_that_tears_a_matrix_apart_is_refused(make: Callable[..., Made], tmp_path: Path) -> None:
    from safetensors.torch import load_file

    made = make("int8_sq")
    plain = load_file(made.original / "model.safetensors")["model.layers.0.self_attn.k_proj.weight"]
    other = _changed(made, tmp_path, {"model.layers.0.self_attn.k_proj.weight": lambda _: plain})
    with pytest.raises(Refused, match="q_proj is in INT8, .*k_proj in high precision: they are one matrix"):
        other.ours(tmp_path / "out", 1)


def test_layers_are_read_as_they_are_stored(make: Callable[..., Made]) -> None:
    layer = read_linear(Folder(make("int8_sq").export), "model.layers.0.mlp.down_proj")
    assert (layer.kind, layer.weight.shape, layer.scale.shape, layer.input_scale.shape, layer.prequant.shape) == (
        "INT8",
        (128, 256),
        (128,),
        (1,),
        (256,),
    )
    assert read_linear(Folder(make("int8_mixed").export), "model.layers.0.mlp.down_proj").kind is None
