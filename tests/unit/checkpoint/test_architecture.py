"""Every parameter by name and shape against config.json, for many families; tied and untied heads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint.architecture import Architecture, check_architecture, check_tying
from pipeline.checkpoint.layout import read_layout
from pipeline.checkpoint.tensors import read_headers, scan_tensors
from pipeline.errors import CheckpointError
from tests.unit.checkpoint.conftest import edit_json, edit_tensors, split

SMALL = {
    **{"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2},
}
WIDE = {"vocab_size": 96, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": SMALL | {"head_dim": 16},
    "Mistral": SMALL,
    "Qwen2": SMALL,
    "Qwen3": SMALL | {"head_dim": 16},
    "Phi": SMALL,
    "Phi3": SMALL,
    "Gemma": SMALL | {"head_dim": 8},
    "Gemma2": SMALL | {"head_dim": 8},
    "Mixtral": SMALL | {"num_local_experts": 4},
    "Qwen3Moe": SMALL | {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 8},
    "GPT2": {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "GPTNeoX": WIDE | {"intermediate_size": 64, "max_position_embeddings": 64},
    "OPT": WIDE | {"ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 64, "pad_token_id": 1},
    "Falcon": WIDE,
}
DOWN = "model.layers.1.mlp.down_proj.weight"


def _check(folder: Path) -> Architecture:
    layout = read_layout(folder)
    return check_architecture(layout, read_headers(layout))


def _tying(folder: Path) -> str | None:
    layout = read_layout(folder)
    headers = read_headers(layout)
    return check_tying(layout, check_architecture(layout, headers), scan_tensors(layout, headers))


def _write(folder: Path, family: str, **changes: Any) -> None:
    import transformers

    config = getattr(transformers, f"{family}Config")(**FAMILIES[family] | changes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_saves_is_accepted_and_a_changed_tensor_is_not(family: str, tmp_path: Path) -> None:
    _write(tmp_path, family)
    found = _check(tmp_path)
    assert found.name.lower() == f"{family}ForCausalLM".lower().replace("gpt2forcausallm", "gpt2lmheadmodel")
    assert (found.layers, found.vocabulary) == (2, 96)
    headers = read_headers(read_layout(tmp_path))
    assert found.embedding in headers
    # The last block loses a row of its last matrix (stacked experts: transformers words it otherwise).
    name = [key for key, header in headers.items() if len(header.shape) == 2 and ".1." in key][-1]
    edit_tensors(tmp_path, lambda tensors: tensors.update({name: tensors[name][:-1].clone()}))
    with pytest.raises(CheckpointError, match="which config.json makes|fused weights have other shapes"):
        _check(tmp_path)


def test_a_base_model_without_its_prefix_is_accepted(tmp_path: Path) -> None:
    """GPT-2 on the hub stores `wte.weight`, not `transformer.wte.weight`."""
    _write(tmp_path, "GPT2")

    def strip(tensors: dict[str, Any]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)

    edit_tensors(tmp_path, strip)
    found = _check(tmp_path)
    assert (found.embedding, found.head, found.tied) == ("wte.weight", None, True)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hidden_size", 192, "embed_tokens.weight as \\[85, 128\\], which config.json makes \\[85, 192\\]"),
        ("intermediate_size", 384, "down_proj.weight as \\[128, 256\\], which config.json makes \\[128, 384\\]"),
        ("num_attention_heads", 8, "o_proj.weight as \\[128, 128\\], which config.json makes \\[128, 256\\]"),
        ("num_key_value_heads", 4, "k_proj.weight as \\[64, 128\\], which config.json makes \\[128, 128\\]"),
        ("head_dim", 16, "k_proj.weight as \\[64, 128\\], which config.json makes \\[32, 128\\]"),
        ("vocab_size", 90, "embed_tokens.weight as \\[85, 128\\], which config.json makes \\[90, 128\\]"),
        ("num_hidden_layers", 3, "lacks model.layers.2.input_layernorm.weight"),
        ("num_hidden_layers", 1, "unknown to the model, model.layers.1.input_layernorm.weight"),
        ("num_attention_heads", 7, "config.json makes no causal language model"),
        ("model_type", "a-new-family", "config.json makes no causal language model"),
        ("model_type", "t5", "config.json makes no causal language model"),
        ("hidden_size", "wide", "config.json makes no causal language model"),
        ("hidden_act", "no-such-function", "config.json makes no causal language model"),
    ],
)
def test_each_size_of_the_config_is_held_against_the_weights(
    checkpoint: Path, key: str, value: Any, message: str
) -> None:
    edit_json(checkpoint / "config.json", **{key: value})
    with pytest.raises(CheckpointError, match=message) as caught:
        _check(checkpoint)
    assert "same model" in caught.value.next_step


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda found: found.pop(DOWN), f"lacks {DOWN}"),
        (lambda found: found.update({"v_head.weight": found[DOWN].clone()}), "unknown to the model, v_head.weight"),
        (lambda found: found.update({DOWN: found[DOWN].T.contiguous()}), f"holds {DOWN} as \\[256, 128\\]"),
        (
            lambda found: found.update({DOWN.replace("weight", "lora_A.weight"): found[DOWN].clone()}),
            "a LoRA adapter that is not merged",
        ),
    ],
)
def test_missing_and_strange_tensors_are_named(
    checkpoint: Path, edit: Callable[[dict[str, Any]], Any], message: str
) -> None:
    edit_tensors(checkpoint, edit)
    split(checkpoint)
    with pytest.raises(CheckpointError, match=message):
        _check(checkpoint)


def test_tied_without_a_head(checkpoint: Path) -> None:
    found = _check(checkpoint)
    assert (found.tied, found.head) == (True, None)
    assert _tying(checkpoint) is None


def test_tied_with_the_same_head_stored_is_what_older_saves_do(checkpoint: Path) -> None:
    edit_tensors(checkpoint, lambda found: found.update({"lm_head.weight": found["model.embed_tokens.weight"].clone()}))
    assert _check(checkpoint).head == "lm_head.weight"
    assert _tying(checkpoint) is None


def test_tied_with_another_head_stored_is_refused(checkpoint: Path) -> None:
    edit_tensors(checkpoint, lambda found: found.update({"lm_head.weight": found["model.embed_tokens.weight"] + 1}))
    with pytest.raises(CheckpointError, match="embeddings are tied, but lm_head.weight is stored and differs"):
        _tying(checkpoint)


def test_untied_without_a_head_is_refused(checkpoint: Path) -> None:
    edit_json(checkpoint / "config.json", tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match="embeddings are not tied, but lm_head.weight is missing"):
        _check(checkpoint)


def test_untied_with_a_copy_as_head_is_flagged(tmp_path: Path) -> None:
    _write(tmp_path, "Llama", tie_word_embeddings=False)
    assert _tying(tmp_path) is None
    edit_tensors(tmp_path, lambda found: found.update({"lm_head.weight": found["model.embed_tokens.weight"].clone()}))
    assert _tying(tmp_path) == (
        "lm_head.weight is a copy of model.embed_tokens.weight although config.json says that embeddings are not tied"
    )
