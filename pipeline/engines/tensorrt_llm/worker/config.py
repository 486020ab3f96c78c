"""``config.json`` of a TensorRT-LLM checkpoint, from a Hugging Face configuration in the form of transformers 4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .tensors import Refused


@dataclass(frozen=True)
class Family:
    """An architecture whose tensors have a place in the checkpoint that ``convert`` writes.

    ``decoder`` is ModelOpt's word for it; ``extras`` are the keys that TensorRT-LLM's own quantisation script adds.
    """

    architecture: str
    decoder: str
    qkv_bias: bool = False
    extras: tuple[str, ...] = ()


FAMILIES = {
    family.architecture: family
    for family in (
        Family("LlamaForCausalLM", "llama"),
        Family("MistralForCausalLM", "llama"),
        Family("Qwen2ForCausalLM", "qwen", qkv_bias=True, extras=("qwen_type",)),
    )
}


def family_of(config: dict[str, Any]) -> Family:
    """The family of a checkpoint. Raises Refused for one that is not in ``FAMILIES``, or not wholly like it."""
    architecture = (config.get("architectures") or ["?"])[0]
    if architecture not in FAMILIES:
        raise Refused(
            f"{architecture}: this backend writes TensorRT-LLM checkpoints of {', '.join(FAMILIES)}",
            "for FP8 and FP16 set engine.tensorrt_llm.build: llm-api, which leaves the conversion to TensorRT-LLM; "
            "or set engine.tensorrt_llm.profile: pytorch, or another engine.backend",
        )
    family = FAMILIES[architecture]
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        raise Refused(
            f"{architecture} with a sliding window of {config['sliding_window']} tokens: an engine would attend to all",
            "set engine.tensorrt_llm.profile: pytorch, or another engine.backend",
        )
    return family


def checkpoint_config(
    family: Family, config: dict[str, Any], *, quantization: dict[str, Any], excluded: list[str], dtype: str, tp: int
) -> dict[str, Any]:
    """The content of config.json; its keys are those of ModelOpt's export and of the patches after it."""
    heads = config["num_attention_heads"]
    described: dict[str, Any] = {
        "producer": {"name": "enginegate"},
        "architecture": family.architecture,
        "model_type": family.decoder,
        "dtype": dtype,
        "logits_dtype": "float16" if dtype == "bfloat16" else dtype,
        "num_hidden_layers": config["num_hidden_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_size": config.get("head_dim") or config["hidden_size"] // heads,
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "hidden_act": config["hidden_act"],
        "norm_epsilon": config["rms_norm_eps"],
        "vocab_size": config["vocab_size"],
        "max_position_embeddings": config["max_position_embeddings"],
        "position_embedding_type": "rope_gpt_neox",
        "rotary_base": config["rope_theta"],
        "rotary_scaling": config.get("rope_scaling"),
        "rotary_pct": 1.0,
        "use_parallel_embedding": True,
        "embedding_sharding_dim": 0,
        "share_embedding_table": False,
        "residual_mlp": False,
        "bias": False,
        "lm_head_bias": False,
        "rmsnorm": True,
        "decoder": family.decoder,
        "rank": tp - 1,
        "mapping": {"world_size": tp, "tp_size": tp, "pp_size": 1},
        "quantization": _quantization(quantization, excluded),
    }
    if "qwen_type" in family.extras:
        described["qwen_type"] = config["model_type"]
    return described


def _quantization(quantization: dict[str, Any], excluded: list[str]) -> dict[str, Any]:
    algo = quantization.get("quant_algo")
    found: dict[str, Any] = {"quant_algo": algo, "kv_cache_quant_algo": quantization.get("kv_cache_quant_algo")}
    if algo is not None:
        # TensorRT-LLM's documentation and its class differ on the default group size, so it is always written.
        found |= {"exclude_modules": sorted(excluded), "group_size": quantization.get("group_size", 128)}
    if algo == "W4A16_AWQ":
        found |= {"has_zero_point": False, "pre_quant_scale": True}
    return found
