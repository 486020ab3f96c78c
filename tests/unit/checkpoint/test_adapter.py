"""A merged adapter answers as the adapter did, and one that does not fit is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint.intake import inspect_checkpoint
from pipeline.checkpoint.materialize import materialize
from pipeline.errors import CheckpointError
from pipeline.files import digest_file
from pipeline.params import Model
from tests import tiny
from tests.unit.checkpoint.conftest import edit_json, edit_tensors

KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "lora and a trained head": {"modules_to_save": ["lm_head"]},
    "lora and trained embeddings": {"modules_to_save": ["embed_tokens"]},
}


def _train(base: Path, adapter: Path, **settings: Any) -> Any:
    """Writes an adapter that changes the base; returns the model with it."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    lora = get_peft_model(
        model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False, **settings)
    )
    for name, parameter in lora.named_parameters():
        if "modules_to_save" in name:
            parameter.data += 0.01 * torch.randn_like(parameter)
    lora.save_pretrained(adapter)
    return lora.eval()


def _merge(base: Path, adapter: Path, target: Path) -> dict[str, Any]:
    return materialize(Model(checkpoint=str(base), adapter=str(adapter)), {"kind": "folder"}, target)


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_is_merged(tmp_path: Path, kind: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    base = tmp_path / "base"
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(
        LlamaConfig(vocab_size=85, **small, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2)
    ).save_pretrained(base)
    tiny.tokenizer().save_pretrained(base)
    lora = _train(base, tmp_path / "adapter", **KINDS[kind])
    ids = torch.tensor([[5, 6, 7]])
    expected = lora(ids).logits
    record = _merge(base, tmp_path / "adapter", tmp_path / "target")
    assert record["adapter"]["weights"] == digest_file(tmp_path / "adapter/adapter_model.safetensors")
    assert record["adapter"]["use_dora"] == (kind == "dora")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float32).eval()
    torch.testing.assert_close(merged(ids).logits, expected, rtol=1e-4, atol=1e-5)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    assert (plain(ids).logits - expected).abs().max() > 1e-3  # the adapter does something
    assert inspect_checkpoint(tmp_path / "target", needs_template=True)["warnings"] == []


def test_the_adapters_own_tokenizer_and_template_win(tiny_checkpoint: Path, tmp_path: Path) -> None:
    _train(tiny_checkpoint, tmp_path / "adapter")
    words = tiny.tokenizer()
    words.chat_template = "{{ messages[0].content }} =>"
    words.save_pretrained(tmp_path / "adapter")
    _merge(tiny_checkpoint, tmp_path / "adapter", tmp_path / "target")
    assert (tmp_path / "target/chat_template.jinja").read_text() == "{{ messages[0].content }} =>"


def _deeper(adapter: Path) -> None:
    def edit(found: dict[str, Any]) -> None:
        name = next(iter(found))
        found[name.replace("layers.0", "layers.7").replace("layers.1", "layers.7")] = found[name].clone()

    edit_tensors(adapter, edit, "adapter_model.safetensors")


def _wider(adapter: Path) -> None:
    import torch

    def edit(found: dict[str, Any]) -> None:
        for name in found:
            if "lora_A" in name:
                found[name] = torch.zeros(2, 192)

    edit_tensors(adapter, edit, "adapter_model.safetensors")


def _smaller(adapter: Path) -> None:
    edit_tensors(adapter, lambda found: found.pop(next(iter(found))), "adapter_model.safetensors")


def _diverged(adapter: Path) -> None:
    edit_tensors(adapter, lambda found: next(iter(found.values())).fill_(float("nan")), "adapter_model.safetensors")


def _pickle(adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_deeper, "layers.7.* has no place in the base"),
        (_wider, "the adapter does not fit .*size mismatch"),
        (_smaller, "is missing from the adapter"),
        (_diverged, "NaNs detected"),
        (_pickle, "no adapter_model.safetensors \\(adapter_model.bin is a pickle and is never read\\)"),
        (lambda adapter: (adapter / "adapter_config.json").unlink(), "no adapter_config.json"),
        (lambda adapter: (adapter / "adapter_config.json").write_text("{"), "adapter_config.json: not usable JSON"),
        (lambda adapter: edit_json(adapter / "adapter_config.json", peft_type="IA3"), "peft_type IA3: only LoRA"),
        (
            lambda adapter: edit_json(adapter / "adapter_config.json", target_modules=["query_key_value"]),
            "the adapter does not fit .*query_key_value",
        ),
    ],
)
def test_a_bad_adapter_is_refused_and_leaves_nothing(
    tiny_checkpoint: Path, tmp_path: Path, spoil: Callable[[Path], Any], message: str
) -> None:
    adapter = tmp_path / "adapter"
    _train(tiny_checkpoint, adapter)
    spoil(adapter)
    with pytest.raises(CheckpointError, match=message) as caught:
        _merge(tiny_checkpoint, adapter, tmp_path / "target")
    assert caught.value.next_step
    assert not (tmp_path / "target").exists()


def test_an_adapter_of_another_hub_model_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    from pipeline.checkpoint.adapter import check_adapter

    _train(tiny_checkpoint, tmp_path / "adapter")
    edit_json(tmp_path / "adapter/adapter_config.json", base_model_name_or_path="org/base-7B")
    with pytest.raises(CheckpointError, match="trained on org/base-7B, but model.checkpoint is org/base-13B"):
        check_adapter(tmp_path / "adapter", "org/base-13B")
    assert check_adapter(tmp_path / "adapter", "Org/Base-7b")["r"] == 2
    assert check_adapter(tmp_path / "adapter", str(tiny_checkpoint))["r"] == 2  # folders move: shapes must tell


def test_nothing_is_merged_into_a_quantised_base(checkpoint: Path, tmp_path: Path) -> None:
    import torch

    _train(checkpoint, tmp_path / "adapter")
    edit_tensors(checkpoint, lambda found: found.update({"x.weight": torch.zeros(4, 4).to(torch.float8_e4m3fn)}))
    with pytest.raises(CheckpointError, match="already quantised"):
        _merge(checkpoint, tmp_path / "adapter", tmp_path / "target")
    assert json.loads((tmp_path / "adapter/adapter_config.json").read_text())["r"] == 2
