"""Packed samples give what they give alone, in every architecture that is packed; the others are found out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from pipeline.quantize.packing import PackedForward, check_packing, pack

COMMON: dict[str, Any] = {
    "vocab_size": 85, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2}
PACKED = {
    "Llama": {},
    "Qwen3": {"head_dim": 16},
    "Mistral": {"sliding_window": 8},
    "Gemma3Text": {"head_dim": 16, "sliding_window": 8},
    "GPT2": {"n_embd": 64, "n_layer": 2, "n_head": 4},
    "Mixtral": {"num_local_experts": 4, **EXPERTS},
}
NOT_PACKED = {
    "Gemma2": ({"head_dim": 16, "sliding_window": 8}, "softcap"),
    "GptOss": ({"head_dim": 16, "num_local_experts": 4, **EXPERTS}, "s_aux"),
    "Mamba": ({"state_size": 8}, "differ|neighbour"),
    "Qwen3Next": ({"head_dim": 16, "num_experts": 4, "moe_intermediate_size": 32, **EXPERTS}, "neighbour"),
}


def _body(name: str, more: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**COMMON | more)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval().base_model


def _rows(*lengths: int) -> list[Any]:
    draw = np.random.default_rng(3)
    return [draw.integers(5, 85, length).astype(np.int32) for length in lengths]


@pytest.mark.parametrize("name", PACKED)
def test_packed_states_are_those_of_each_sample_alone(name: str) -> None:
    body, rows = _body(name, PACKED[name]), _rows(40, 3, 17, 40, 1)
    with torch.no_grad(), PackedForward(body) as forward:
        together = forward(pack(rows))[0][0]
    start = 0
    for row in rows:
        with torch.no_grad():
            alone = body(input_ids=torch.from_numpy(row.astype(np.int64))[None])[0][0]
        torch.testing.assert_close(together[start : start + len(row)], alone, rtol=1e-4, atol=1e-5)
        start += len(row)
    assert check_packing(body, rows[:2], torch.device("cpu")) is None


@pytest.mark.parametrize("name", NOT_PACKED)
def test_what_cannot_be_packed_is_found_out(name: str) -> None:
    """In bfloat16, where a leak of a few per cent hides in the rounding unless equal shapes are compared."""
    more, why = NOT_PACKED[name]
    found = check_packing(_body(name, more, torch.bfloat16), _rows(40, 5), torch.device("cpu"))
    import re

    assert found is not None
    assert re.search(why, found)


def test_the_models_own_attention_comes_back() -> None:
    body = _body("Llama", {})
    before = body.config._attn_implementation
    with pytest.raises(ZeroDivisionError), PackedForward(body):
        1 / 0  # noqa: B018
    assert body.config._attn_implementation == before


def test_equal_lengths_need_no_index() -> None:
    packed = pack(_rows(7, 7))
    assert packed.padded is packed.joined is None
    assert packed.position_ids.tolist() == [[*range(7), *range(7)]]


def test_the_places_of_a_packed_batch_by_hand() -> None:
    """Samples of 2 and 1 tokens: a grid of 2 x 2 whose last place repeats the last token of its sample."""
    packed = pack([np.array([5, 6], np.int32), np.array([7], np.int32)])
    assert packed.input_ids.tolist() == [[5, 6, 7]]
    assert packed.position_ids.tolist() == [[0, 1, 0]]
    assert packed.padded.tolist() == [0, 1, 2, 2]
    assert packed.joined.tolist() == [0, 1, 2]
