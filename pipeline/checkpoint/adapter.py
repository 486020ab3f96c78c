"""A LoRA adapter merged into its base: what peft does, with every mismatch made an error.

The base is loaded whole, on the CPU, in the precision in which it is stored. DoRA, rank-stabilised LoRA and
``modules_to_save`` are peft's business; a tensor of the adapter that found no place is ours.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.checkpoint.layout import read_settings
from pipeline.errors import CheckpointError
from pipeline.files import digest_file

_WEIGHTS = "adapter_model.safetensors"


def merge_adapter(folder: Path, adapter: Path, target: Path, *, base_id: str, trust_remote_code: bool) -> None:
    """Writes base + adapter as a checkpoint into the folder ``target``.

    The tokenizer is the adapter's where one lies beside it (the fine-tune may have added tokens or changed the
    template), else the base's. ``base_id`` is what ``params.yaml`` calls the base. Raises CheckpointError.
    """
    settings = check_adapter(adapter, base_id)
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", trust_remote_code=trust_remote_code, use_safetensors=True, local_files_only=True
    )
    try:
        merged = PeftModel.from_pretrained(model, str(adapter))
    except (RuntimeError, ValueError, KeyError) as error:
        first = str(error).strip().splitlines()
        raise CheckpointError(
            f"{adapter}: the adapter does not fit {folder}: {' '.join(first[:2])}",
            f"merge it into the checkpoint that it was trained on ({settings.get('base_model_name_or_path')})",
        ) from error
    _refuse_leftovers(adapter, merged)
    try:
        whole = merged.merge_and_unload(safe_merge=True)
    except ValueError as error:  # peft's word for NaN after merging
        raise CheckpointError(f"{adapter}: {error}", "the fine-tune diverged: go back to an earlier adapter") from error
    whole.save_pretrained(target)
    own = adapter if (adapter / "tokenizer_config.json").exists() else folder
    AutoTokenizer.from_pretrained(own, trust_remote_code=trust_remote_code, local_files_only=True).save_pretrained(
        target
    )


def check_adapter(adapter: Path, base_id: str) -> dict[str, Any]:
    """``adapter_config.json``, once it is clear that this is a LoRA adapter of ``base_id``. Raises CheckpointError.

    Two hub ids that differ are a mismatch; a local path says nothing (folders move), so then shapes must tell.
    """
    if not (adapter / _WEIGHTS).exists():
        pickle = (
            " (adapter_model.bin is a pickle and is never read)" if (adapter / "adapter_model.bin").exists() else ""
        )
        raise CheckpointError(f"{adapter}: no {_WEIGHTS}{pickle}", "save the adapter with peft's save_pretrained")
    settings = read_settings(adapter / "adapter_config.json")
    if not settings:
        raise CheckpointError(f"{adapter}: no adapter_config.json", "save the adapter with peft's save_pretrained")
    if (kind := settings.get("peft_type")) != "LORA":
        raise CheckpointError(
            f"{adapter}: peft_type {kind}: only LoRA (DoRA included) can be merged here",
            "merge it yourself, if it can be merged, and give the result as model.checkpoint",
        )
    trained_on = str(settings.get("base_model_name_or_path"))
    if _is_hub_id(trained_on) and _is_hub_id(base_id) and trained_on.lower() != base_id.lower():
        raise CheckpointError(
            f"{adapter}: trained on {trained_on}, but model.checkpoint is {base_id}",
            f"set model.checkpoint: {trained_on}, or correct base_model_name_or_path in adapter_config.json",
        )
    return settings


def adapter_record(adapter: Path) -> dict[str, Any]:
    """What intake keeps about an adapter: its digest and what it says it was trained on."""
    settings = read_settings(adapter / "adapter_config.json")
    kept = ("base_model_name_or_path", "peft_type", "r", "lora_alpha", "use_dora", "use_rslora", "modules_to_save")
    return {"weights": digest_file(adapter / _WEIGHTS), **{key: settings.get(key) for key in kept}}


def _is_hub_id(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/")) and not Path(name).exists()


def _refuse_leftovers(adapter: Path, merged: Any) -> None:
    """peft only warns about tensors that belong to no module of the base."""
    from peft import get_peft_model_state_dict
    from safetensors import safe_open

    with safe_open(adapter / _WEIGHTS, framework="pt") as file:
        stored = set(file.keys())
    own = set(get_peft_model_state_dict(merged, save_embedding_layers=False))
    # Embeddings that were trained beside the adapter are stored under the name of the base's own parameter.
    places = own | set(merged.state_dict())
    for what, names in (("has no place in the base", stored - places), ("is missing from the adapter", own - stored)):
        if names:
            raise CheckpointError(
                f"{adapter}: {min(names)} {what} ({len(names)} such tensors)",
                "merge it into the checkpoint that it was trained on",
            )
