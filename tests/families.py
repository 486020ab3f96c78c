"""Tiny random models of the architectures that the project lowers, and a plain runner of their ONNX graphs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY = 96
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
_GROUPED = _SIZES | {"num_key_value_heads": 2}
_WINDOW = {"sliding_window": 5, "head_dim": 16}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _GROUPED),
    "llama-tied": ("LlamaConfig", _GROUPED | {"tie_word_embeddings": True, "mlp_bias": True}),
    "qwen2": ("Qwen2Config", _GROUPED),  # biases in q, k and v
    "qwen3": ("Qwen3Config", _GROUPED | {"head_dim": 32}),  # norms of q and k
    "mistral": ("MistralConfig", _GROUPED | _WINDOW),
    "phi": ("PhiConfig", _SIZES),  # parallel blocks, part of each head is rotated
    "phi3": ("Phi3Config", _GROUPED),  # q, k and v in one weight, gate and up too
    "gemma2": ("Gemma2Config", _GROUPED | _WINDOW | {"query_pre_attn_scalar": 16}),  # soft caps, scaled embeddings
    "gemma3": ("Gemma3TextConfig", _GROUPED | _WINDOW | {"query_pre_attn_scalar": 16}),
    "gpt2": (  # Conv1D, learned positions, a tied head
        "GPT2Config",
        {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},
    ),
}
UNSUPPORTED: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("BloomConfig", _SIZES),  # positions from the mask
    "mixtral": ("MixtralConfig", _GROUPED),  # experts
    "cohere": ("CohereConfig", _GROUPED),
}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def make_model(family: str, seed: int = 0) -> Any:
    """A random model in float32, with weights large enough that attention and logits differ from flat."""
    import torch
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name, settings = (FAMILIES | UNSUPPORTED)[family]
    torch.manual_seed(seed)
    config = getattr(transformers, name)(**settings, **SPECIAL)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
    return model


def torch_logits(model: Any, tokens: Sequence[int], last: int) -> np.ndarray:
    """The model's logits ``[last, vocabulary]`` at the last places of one sequence, read in one pass."""
    import torch

    with torch.no_grad():
        return model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0, -last:].float().numpy()


def onnx_logits(folder: Path, tokens: Sequence[int], last: int) -> np.ndarray:
    """The same from a plain graph by ONNX Runtime: one pass over the prompt, then cached steps of one token."""
    import onnxruntime as ort

    session = ort.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    inputs = {value.name: value for value in session.get_inputs()}
    outputs = [value.name for value in session.get_outputs()]
    float8 = any("float8" in value.type for value in inputs.values())
    half = any("float16" in value.type for value in inputs.values())
    cache = {}
    for name, value in inputs.items():
        if name.startswith("past_key_values."):
            empty = np.zeros((1, value.shape[1], 0, value.shape[3]), np.float16 if half else np.float32)
            cache[name] = (
                # 17 is FLOAT8E4M3FN; ONNX Runtime takes its bytes.
                ort.OrtValue.ortvalue_from_numpy_with_onnx_type(empty.astype(np.uint8), 17)
                if float8
                else ort.OrtValue.ortvalue_from_numpy(empty)
            )
    found = []
    pieces = [list(tokens[: len(tokens) - last + 1])] + [[token] for token in tokens[len(tokens) - last + 1 :]]
    seen = 0
    for piece in pieces:
        binding = session.io_binding()
        seen += len(piece)
        binding.bind_cpu_input("input_ids", np.array([piece]))
        binding.bind_cpu_input("position_ids", np.arange(seen - len(piece), seen)[None])
        binding.bind_cpu_input("attention_mask", np.ones((1, seen), np.int64))
        binding.bind_cpu_input("logit_positions", np.array([len(piece) - 1]))
        for name, value in cache.items():
            binding.bind_ortvalue_input(name, value)
        for name in outputs:
            binding.bind_output(name, "cpu")
        session.run_with_iobinding(binding)
        logits, *present = binding.get_outputs()
        found.append(logits.numpy()[0, -1])
        cache = dict(zip(cache, present, strict=True))
    return np.stack(found).astype(np.float32)
