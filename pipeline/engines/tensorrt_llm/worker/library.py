"""What needs TensorRT-LLM itself: comparing a checkpoint's config with its own, and building by the LLM API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# A checkpoint that disagrees with the library in one of these would be another model.
_SAME = (
    *("architecture", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_size", "hidden_act", "norm_epsilon", "rotary_base", "max_position_embeddings"),
)


def compare_config(checkpoint: Path, older: Path) -> dict[str, Any]:
    """What the library's own reading of the Hugging Face config.json in ``older`` says otherwise than ours.

    ``wrong`` (keys that make it another model) and ``other`` map a key to [ours, the library's]; ``not_compared``
    says why the library could not be asked, empty when it could.
    """
    ours = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    try:
        from tensorrt_llm.models import MODEL_MAP
        from tensorrt_llm.models.modeling_utils import Mapping, QuantConfig

        theirs = (
            MODEL_MAP[ours["architecture"]]
            .config_class.from_hugging_face(
                str(older),
                dtype=ours["dtype"],
                mapping=Mapping(**ours["mapping"]),
                quant_config=QuantConfig(**ours["quantization"]),
            )
            .to_dict()
        )
    except Exception as error:  # noqa: BLE001  a comparison that this version does not allow; the answer says so
        return {"wrong": {}, "other": {}, "not_compared": f"{type(error).__name__}: {error}"}
    both = {key: [ours[key], theirs[key]] for key in sorted(ours.keys() & theirs.keys()) if ours[key] != theirs[key]}
    wrong = {key: pair for key, pair in both.items() if key in _SAME}
    nested = ("mapping", "quantization", "producer")  # the library adds keys of its own there
    other = {key: pair for key, pair in both.items() if key not in _SAME and key not in nested}
    return {"wrong": wrong, "other": other, "not_compared": ""}


def build_engine(model: Path, tokenizer: Path, target: Path, options: dict[str, Any]) -> None:
    """Builds and saves an engine by the LLM API from a Hugging Face folder.

    ``options``: ``build_config`` (its fields), ``plugin_config`` (its fields) and ``llm`` (arguments of the LLM).
    """
    from tensorrt_llm import BuildConfig
    from tensorrt_llm._tensorrt_engine import LLM  # not tensorrt_llm.LLM, which is the PyTorch one since 1.0

    build_config = BuildConfig()
    for name, value in options["build_config"].items():
        setattr(build_config, name, value)
    for name, value in options["plugin_config"].items():
        setattr(build_config.plugin_config, name, value)
    llm = LLM(model=str(model), tokenizer=str(tokenizer), build_config=build_config, **options["llm"])
    llm.save(str(target))
