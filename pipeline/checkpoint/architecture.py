"""Shapes against config: transformers itself says what a checkpoint lacks, has too much, or has in the wrong shape.

The model is built and "loaded" on torch's meta device, so that no weight is read, yet the renamings and fused
experts of every family that transformers knows are honoured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pipeline.checkpoint.layout import Layout
from pipeline.checkpoint.tensors import Header, Stored
from pipeline.errors import CheckpointError

# The sizes that decide shapes, as most families name them; shown beside a wrong shape.
_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "num_experts", "num_local_experts"),
)


@dataclass(frozen=True)
class Architecture:
    """What config.json describes. ``head`` and ``embedding`` are the stored tensors' names; ``head`` is None when
    the checkpoint does not store one. ``vocabulary`` is the number of rows of the embedding."""

    name: str
    layers: int
    vocabulary: int
    tied: bool
    embedding: str
    head: str | None


def check_architecture(layout: Layout, headers: dict[str, Header], *, trust_remote_code: bool = False) -> Architecture:
    """Compares every stored tensor with the model of config.json by name and shape.

    Raises CheckpointError for a config that makes no causal language model, and for missing, unexpected and
    wrongly shaped tensors (the first three by name).
    """
    if unmerged := [name for name in headers if ".lora_" in name or ".base_layer." in name]:
        raise CheckpointError(
            f"{layout.folder}: {unmerged[0]}: a LoRA adapter that is not merged",
            "save the adapter by itself and set model.adapter, or call merge_and_unload() before save_pretrained",
        )
    model, info = _load_on_meta(layout, trust_remote_code)
    text = model.config.get_text_config(decoder=True)
    tied = bool(getattr(model.config, "tie_word_embeddings", False) or getattr(text, "tie_word_embeddings", False))
    head = _name_of(model, model.get_output_embeddings())
    missing = set(info["missing_keys"])
    if head in missing and not tied:
        raise CheckpointError(
            f"{layout.folder}: config.json says that embeddings are not tied, but {head} is missing",
            "set tie_word_embeddings: true if the fine-tune tied them; otherwise save the checkpoint again",
        )
    sizes = {name: getattr(text, name) for name in _SIZES if getattr(text, name, None) is not None}
    _refuse(layout, "lacks", sorted(missing), sizes)
    _refuse(layout, "holds, unknown to the model,", sorted(info["unexpected_keys"]), sizes)
    wrong = [
        f"{name} as {list(stored)}, which config.json makes {list(expected)}"
        for name, stored, expected in sorted(info["mismatched_keys"])
    ]
    _refuse(layout, "holds", wrong, sizes)
    embedding = _name_of(model, model.get_input_embeddings())
    return Architecture(
        name=type(model).__name__,
        layers=int(text.num_hidden_layers),
        vocabulary=int(model.get_input_embeddings().weight.shape[0]),
        tied=tied,
        embedding=_stored_name(embedding, model.base_model_prefix, headers) or embedding,
        head=_stored_name(head, model.base_model_prefix, headers),
    )


def check_tying(layout: Layout, architecture: Architecture, stored: dict[str, Stored]) -> str | None:
    """Tied embeddings must not come with another head. Raises CheckpointError.

    Returns a warning when config.json says untied but the head is a copy of the embedding.
    """
    head, embedding = architecture.head, architecture.embedding
    if head is None or head == embedding or embedding not in stored:
        return None
    same = stored[head] == stored[embedding]
    if architecture.tied and not same:
        raise CheckpointError(
            f"{layout.folder}: config.json says that embeddings are tied, but {head} is stored and "
            f"differs from {embedding}",
            "set tie_word_embeddings: false if the fine-tune trained the head; otherwise delete the stored head",
        )
    if not architecture.tied and same:
        return f"{head} is a copy of {embedding} although config.json says that embeddings are not tied"
    return None


def _refuse(layout: Layout, verb: str, names: list[str], sizes: dict[str, Any]) -> None:
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        said = ", ".join(f"{name} {value}" for name, value in sizes.items())
        raise CheckpointError(
            f"{layout.folder}: the checkpoint {verb} {', '.join(names[:3])}{more} (config.json: {said})",
            "save config and weights from the same model: model.save_pretrained(folder)",
        )


def _load_on_meta(layout: Layout, trust_remote_code: bool) -> tuple[Any, dict[str, Any]]:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoModelForCausalLM

    try:
        with _quiet():
            model, info = AutoModelForCausalLM.from_pretrained(
                layout.folder,
                device_map="meta",
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=trust_remote_code,
            )
    # What a config can be wrong in is not listed anywhere; each of these was seen.
    except (
        *(ValueError, TypeError, KeyError, AttributeError, ImportError, OSError, RuntimeError, ZeroDivisionError),
        *(IndexError, AssertionError, StrictDataclassError),
    ) as error:
        cause = " ".join(str(error).split()) or type(error).__name__
        if "conversion of the weights" in cause:
            cause = f"fused weights have other shapes than config.json says ({layout.config.get('model_type')})"
        raise CheckpointError(
            f"{layout.folder}: config.json makes no causal language model: {cause[:300]}",
            "save config and weights from the same model; a new family may need a newer transformers, or "
            "model.trust_remote_code",
        ) from error
    return model, info


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' table of what did not fit (our error says it) and its progress bar."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _name_of(model: Any, module: Any) -> str:
    """The parameter name of a module's weight; empty for no module."""
    if module is None:
        return ""
    return next((f"{name}.weight" for name, found in model.named_modules() if found is module), "")


def _stored_name(name: str, prefix: str, headers: dict[str, Header]) -> str | None:
    """A parameter's name in the checkpoint, which may lack the prefix of the base model, or have it in addition."""
    candidates = (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}")
    return next((candidate for candidate in candidates if candidate and candidate in headers), None)
