"""Intake: a checkpoint is read once, tensor by tensor, and refused for what would make a bad engine later.

Memory stays at one tensor: shards are opened lazily, never loaded whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.checkpoint.fingerprints import fingerprints
from pipeline.errors import CheckpointError
from pipeline.files import read_json

FP16_MAX = 65504.0
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def inspect_checkpoint(folder: Path, *, needs_template: bool, trust_remote_code: bool = False) -> dict[str, Any]:
    """Checks a checkpoint folder and describes it as JSON.

    Keys: ``architecture``, ``parameters``, ``layers``, ``vocabulary``, ``tied_embeddings``, ``eos_token_ids``,
    ``fp16_overflow`` (names of tensors with values beyond FP16), ``fingerprints``, ``trust_remote_code``.
    Raises CheckpointError naming the file or tensor and the next step.
    """
    config = _config(folder)
    _refuse_files(folder, config, trust_remote_code)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{folder}: the tokenizer does not load: {error}", "save it beside the weights: tokenizer.save_pretrained"
        ) from error
    tensors = _scan_tensors(folder)
    vocabulary = _vocabulary(folder, config, tensors["shapes"], tokenizer)
    if needs_template and not tokenizer.chat_template:
        raise CheckpointError(
            f"{folder}: the tokenizer has no chat template but prompt.template is `chat`",
            "add chat_template.jinja to the checkpoint, or set prompt.template: plain",
        )
    return {
        "architecture": (config.get("architectures") or ["?"])[0],
        "parameters": tensors["parameters"],
        "dtypes": tensors["dtypes"],
        "layers": config.get("num_hidden_layers"),
        "vocabulary": vocabulary,
        "tied_embeddings": "lm_head.weight" not in tensors["shapes"],
        "eos_token_ids": _eos_ids(folder, config, tokenizer, vocabulary),
        "fp16_overflow": tensors["overflow"],
        "fingerprints": fingerprints(folder, tokenizer),
        "trust_remote_code": trust_remote_code,
    }


def _config(folder: Path) -> dict[str, Any]:
    if not (folder / "config.json").exists():
        raise CheckpointError(f"{folder}: no config.json", "give the folder that save_pretrained wrote")
    config: dict[str, Any] = read_json(folder / "config.json")
    if "quantization_config" in config:
        method = config["quantization_config"].get("quant_method", "?")
        raise CheckpointError(
            f"{folder}: already quantised ({method})",
            "give the checkpoint that the fine-tune wrote, before quantisation",
        )
    return config


def require_safetensors(folder: Path) -> None:
    """Raises CheckpointError for a folder whose weights are missing or only there as pickles."""
    if not list(folder.glob("*.safetensors")):
        pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
        found = f"only {', '.join(pickles)}" if pickles else "no weights at all"
        raise CheckpointError(
            f"{folder}: no safetensors file, {found}",
            "pickle files can run code and are never read: save with model.save_pretrained(folder)",
        )


def _refuse_files(folder: Path, config: dict[str, Any], trust_remote_code: bool) -> None:
    require_safetensors(folder)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = set(read_json(index)["weight_map"].values())
        missing = sorted(name for name in shards if not (folder / name).exists())
        if missing:
            raise CheckpointError(f"{folder}: the index names {missing[0]}, which is missing", "copy all shards")
    if "auto_map" in config and not trust_remote_code:
        raise CheckpointError(
            f"{folder}: config.json asks to run code from the checkpoint (auto_map)",
            "read that code, then set model.trust_remote_code: true",
        )


def _tensors(folder: Path) -> Iterator[tuple[str, Path, Any]]:
    from safetensors import SafetensorError, safe_open

    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118 - not a dict
                    yield name, path, shard.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{path}: damaged: {error}", "copy or save the file again") from error


def _scan_tensors(folder: Path) -> dict[str, Any]:
    import torch
    from tqdm import tqdm

    shapes: dict[str, list[int]] = {}
    dtypes: dict[str, int] = {}
    overflow: list[str] = []
    for name, path, tensor in tqdm(_tensors(folder), desc="reading tensors", unit="tensor", mininterval=2):
        shapes[name] = list(tensor.shape)
        dtype = str(tensor.dtype).removeprefix("torch.")
        dtypes[dtype] = dtypes.get(dtype, 0) + tensor.numel()
        if not tensor.is_floating_point() or tensor.numel() == 0:
            continue
        # One pass: NaN and infinities survive aminmax.
        low, high = (bound.float().item() for bound in torch.aminmax(tensor))
        if not (torch.isfinite(torch.tensor([low, high])).all()):
            flat = tensor.flatten().float()
            bad = int((~torch.isfinite(flat)).sum())
            raise CheckpointError(
                f"{path.name}: {name}: {bad} of {tensor.numel()} values are NaN or infinite",
                "the fine-tune diverged: go back to an earlier checkpoint",
            )
        if max(-low, high) > FP16_MAX:
            overflow.append(name)
    return {"shapes": shapes, "dtypes": dtypes, "overflow": overflow, "parameters": sum(dtypes.values())}


def _vocabulary(folder: Path, config: dict[str, Any], shapes: dict[str, list[int]], tokenizer: Any) -> int:
    vocabulary = int(config["vocab_size"])
    embeddings = [shape for name, shape in shapes.items() if name.endswith(("embed_tokens.weight", "wte.weight"))]
    if embeddings and embeddings[0][0] != vocabulary:
        raise CheckpointError(
            f"{folder}: config.json says vocab_size {vocabulary}, the embedding has {embeddings[0][0]} rows",
            "save config and weights from the same model",
        )
    highest = max(tokenizer.get_vocab().values())
    if highest >= vocabulary:
        token = tokenizer.convert_ids_to_tokens(highest)
        raise CheckpointError(
            f"{folder}: the tokenizer knows {highest + 1} tokens, the model {vocabulary} (first too many: {token!r})",
            "call model.resize_token_embeddings(len(tokenizer)) in the fine-tune, or save the matching tokenizer",
        )
    return vocabulary


def _eos_ids(folder: Path, config: dict[str, Any], tokenizer: Any, vocabulary: int) -> list[int]:
    """Every id that ends an answer: generation config, config and tokenizer may each know some."""
    generation = folder / "generation_config.json"
    settings = json.loads(generation.read_text(encoding="utf-8")) if generation.exists() else {}
    found: set[int] = set()
    for value in (settings.get("eos_token_id"), config.get("eos_token_id"), tokenizer.eos_token_id):
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    if not found:
        raise CheckpointError(
            f"{folder}: no end-of-sequence token anywhere", "set eos_token_id in generation_config.json"
        )
    if max(found) >= vocabulary:
        raise CheckpointError(
            f"{folder}: end-of-sequence id {max(found)} is outside the vocabulary of {vocabulary}",
            "correct eos_token_id in generation_config.json",
        )
    return sorted(found)
