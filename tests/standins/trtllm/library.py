"""The stand-in package's classes: the documented names, and nothing else is taken."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pydantic import ConfigDict, create_model

from pipeline.engines.tensorrt_llm import documented
from tests.standins.trtllm import settings
from tests.standins.trtllm.engine import write_engine


def model(name: str, fields: Any) -> Any:
    """A pydantic model with these fields, which forbids all others."""
    missing = settings()["without"].get(name, [])
    kept = {field: (Any, None) for field in sorted(fields) if field not in missing}
    config = ConfigDict(extra="forbid", validate_assignment=True, protected_namespaces=())
    return create_model(name, __config__=config, **kept)


SamplingParams = model("SamplingParams", {"end_id", "pad_id", "max_tokens", "top_k", "stop_token_ids"})
KvCacheConfig = model("KvCacheConfig", documented.KV_CACHE_FIELDS)
CompletionRequest = model("CompletionRequest", documented.COMPLETION_FIELDS)
TorchLlmArgs = model("LLM", documented.LLM_FIELDS)
TrtLlmArgs = model("LLM", documented.LLM_FIELDS | documented.TRT_LLM_FIELDS)
PluginConfig = model("PluginConfig", documented.PLUGIN_FIELDS)
QuantConfig = model("QuantConfig", documented.QUANTIZATION_FIELDS)
_BuildConfig = model("BuildConfig", documented.BUILD_CONFIG_FIELDS)


def BuildConfig(**fields: Any) -> Any:  # noqa: N802
    """With the plugin configuration that the real one starts with."""
    return _BuildConfig(**{"max_batch_size": 2048, "max_num_tokens": 8192, "plugin_config": PluginConfig()} | fields)


BuildConfig.model_fields = _BuildConfig.model_fields  # type: ignore[attr-defined]


class Mapping(SimpleNamespace):
    """Ranks."""


class _Config:
    """What ``from_hugging_face`` of a model's config class gives: the parts that are compared."""

    @classmethod
    def from_hugging_face(cls, hf_config_or_dir: str, *, dtype: str, mapping: Any, quant_config: Any) -> Any:
        config = json.loads((Path(hf_config_or_dir) / "config.json").read_text())
        heads = config["num_attention_heads"]
        theirs = {
            "architecture": config["architectures"][0],
            "dtype": dtype,
            "vocab_size": config["vocab_size"],
            "hidden_size": config["hidden_size"],
            "intermediate_size": config["intermediate_size"],
            "num_hidden_layers": config["num_hidden_layers"],
            "num_attention_heads": heads,
            "num_key_value_heads": config.get("num_key_value_heads", heads),
            "head_size": config.get("head_dim") or config["hidden_size"] // heads,
            "hidden_act": config["hidden_act"],
            "norm_epsilon": config["rms_norm_eps"],
            # transformers 4 reads no rope_parameters.
            "rotary_base": config.get("rope_theta", 10000.0),
            "max_position_embeddings": config["max_position_embeddings"],
            "mapping": vars(mapping),
            "quantization": quant_config.model_dump(),
            "use_parallel_embedding": False,
        }
        return SimpleNamespace(to_dict=lambda: theirs)


MODEL_MAP = {
    name: SimpleNamespace(config_class=_Config)
    for name in ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")
}


class EngineLLM:
    """``tensorrt_llm._tensorrt_engine.LLM``: builds an engine from a Hugging Face folder."""

    def __init__(self, model: str, tokenizer: str | None = None, **kwargs: Any) -> None:
        self.arguments = TrtLlmArgs(model=model, tokenizer=tokenizer, **kwargs)
        folder = Path(model)
        config = json.loads((folder / "config.json").read_text())
        self.quantization: dict[str, Any] = {"quant_algo": None, "kv_cache_quant_algo": None}
        if (folder / "hf_quant_config.json").exists():
            given = json.loads((folder / "hf_quant_config.json").read_text())["quantization"]
            self.quantization = {name: given.get(name) for name in self.quantization}
        heads = config["num_attention_heads"]
        self.config = {
            **{name: config[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size")},
            "architecture": config["architectures"][0],
            "dtype": kwargs.get("dtype", "auto"),
            "num_attention_heads": heads,
            "mapping": {"world_size": kwargs.get("tensor_parallel_size", 1), "tp_size": 1, "pp_size": 1},
            "quantization": self.quantization,
        }
        built = self.arguments.build_config
        Path(built.output_timing_cache).write_bytes(b"timing cache")

    def save(self, engine_dir: str) -> None:
        """Writes the engine, and the tokenizer beside it as the LLM API does."""
        target, built = Path(engine_dir), self.arguments.build_config
        folder = Path(self.arguments.model)
        (weights,) = sorted(folder.glob("*.safetensors"))
        plugins = built.plugin_config.model_dump(exclude_none=True)
        flags = built.model_dump(exclude_none=True) | {"plugin_config": plugins}
        write_engine(target, self.config, flags, [weights.read_bytes()], form="hf")
        shutil.copy(folder / "config.json", target / "hf_config.json")  # for the stand-in server
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(Path(self.arguments.tokenizer) / name, target / name)
