"""Folders that transformers 4 reads: TensorRT-LLM 1.2 has 4.57, and what transformers 5 saved means less to it.

It does not know ``rope_parameters`` and would take a base of 10000 for every model without a word; it does not know
the tokenizer class ``TokenizersBackend``; it wants a mapping where 5 writes a list of special tokens.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from pipeline.errors import BuildError
from pipeline.files import read_json, write_json

_OWN_TO_5 = ("backend", "is_local", "local_files_only")


def older_config(config: dict[str, Any]) -> dict[str, Any]:
    """A model's config.json with the keys of transformers 4 beside those of 5. Raises BuildError if it cannot be."""
    rope = config.get("rope_parameters")
    found = dict(config)
    if rope is not None:
        if "rope_theta" not in rope:
            raise BuildError(
                "the checkpoint has several rotary embeddings (rope_parameters by layer type)",
                "TensorRT-LLM's engines have one: set another engine.backend",
            )
        scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
        found["rope_theta"] = rope["rope_theta"]
        found["rope_scaling"] = None if scaling.get("rope_type", "default") == "default" else scaling
    elif "rope_theta" not in config:
        found["rope_theta"] = 10000.0  # the default of both, said aloud
    if "dtype" in config:
        found["torch_dtype"] = config["dtype"]
    return found


def older_tokenizer_config(config: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer_config.json without what only transformers 5 reads."""
    found = {name: value for name, value in config.items() if name not in _OWN_TO_5}
    if found.get("tokenizer_class") == "TokenizersBackend":
        found["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(found.get("extra_special_tokens"), list):
        found["additional_special_tokens"] = found.pop("extra_special_tokens")
    return found


def write_tokenizer(checkpoint: Path, target: Path) -> None:
    """The tokenizer and configuration of ``checkpoint``, without its weights, in the older form."""
    target.mkdir(parents=True)
    for path in sorted(checkpoint.iterdir()):
        if path.suffix in {".json", ".jinja", ".model", ".txt"} and not path.name.endswith(".index.json"):
            shutil.copy(path, target / path.name)
    for name, rewrite in (("config.json", older_config), ("tokenizer_config.json", older_tokenizer_config)):
        if (target / name).exists():
            write_json(target / name, rewrite(read_json(target / name)))


def write_checkpoint(weights: Path, tokenizer: Path, target: Path, dtype: str) -> None:
    """A Hugging Face folder to serve from: the weights and quantisation of ``weights``, hard-linked where possible.

    Without generation_config.json, whose stop ids would be added to those of a request.
    """
    target.mkdir(parents=True)
    for path in sorted(weights.iterdir()):
        if path.suffix == ".safetensors" or path.name.endswith(".index.json") or path.name == "hf_quant_config.json":
            _link_or_copy(path.resolve(), target / path.name)
    for path in sorted(tokenizer.iterdir()):
        if path.name not in ("config.json", "generation_config.json"):
            shutil.copy(path, target / path.name)
    config = older_config(read_json(weights / "config.json"))
    write_json(target / "config.json", config | {"torch_dtype": dtype, "dtype": dtype})


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copy2(source, target)
