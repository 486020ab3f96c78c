"""What lies in a checkpoint folder, looked at before anything in it is read or run.

Refused here: pickles and GGUF instead of safetensors, what says that it is quantised already, an index that does
not name exactly the shards that are there, links that lead out of the folder, and code that nobody allowed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from pipeline.errors import CheckpointError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")
# Weights a second time in a vendor's own format, beside the shards that transformers reads: left where they are.
_COPIES = "consolidated"
# Files that quantisers leave, and who leaves them.
_QUANTIZED_FILES = {
    "hf_quant_config.json": "ModelOpt",
    "quantize_config.json": "AutoGPTQ",
    "quant_config.json": "AutoAWQ",
}
_DEQUANTIZE = {
    "fp8": "load it with FineGrainedFP8Config(dequantize=True) and save_pretrained, or",
    "mxfp4": "load it with Mxfp4Config(dequantize=True) and save_pretrained, or",
    "bitsandbytes": "load it, call model.dequantize() and save_pretrained, or",
}


@dataclass(frozen=True)
class Layout:
    """A folder that may be read: its ``config.json``, its shards in order, and its code files (if allowed).

    ``index`` maps a tensor's name to its shard's file name; None when ``model.safetensors`` holds all.
    """

    folder: Path
    config: dict[str, Any]
    shards: tuple[Path, ...]
    index: dict[str, str] | None
    code: tuple[Path, ...]


def read_layout(folder: Path, *, trust_remote_code: bool = False) -> Layout:
    """Looks at the files of ``folder``. Raises CheckpointError that names the file and the way out."""
    if (folder / "adapter_config.json").exists():
        raise CheckpointError(
            f"{folder}: adapter_config.json stands here, so this is a LoRA adapter or a checkpoint with one beside it",
            "set model.checkpoint to the base and model.adapter to a folder with the adapter alone",
        )
    if not (folder / "config.json").exists():
        raise CheckpointError(f"{folder}: no config.json", "give the folder that save_pretrained wrote")
    config = read_settings(folder / "config.json")
    _refuse_links(folder)
    _refuse_quantized(folder, config)
    shards, index = _shards(folder)
    return Layout(folder, config, shards, index, _code(folder, config, trust_remote_code))


def read_settings(path: Path) -> dict[str, Any]:
    """A JSON file of the checkpoint as an object; empty when it is not there. Raises CheckpointError.

    A key that stands twice is refused: JSON readers would keep the last one and say nothing.
    """
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_no_twin)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not usable JSON: {error}", "copy or save the file again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: not a JSON object", "copy or save the file again")
    return content


def _no_twin(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        names = [name for name, _ in pairs]
        twin = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twin!r} stands twice")
    return content


def _refuse_links(folder: Path) -> None:
    """A link may lead to a file of the folder itself, or into the blobs of the hub cache that the folder is in."""
    home = folder.resolve()
    allowed = [home]
    if home.parent.name == "snapshots":
        allowed.append(home.parent.parent / "blobs")
    for path in sorted(folder.iterdir()):
        if not path.is_symlink():
            continue
        target = path.resolve()
        if not path.exists():
            raise CheckpointError(f"{folder}: {path.name} links to {target}, which is missing", "copy the file here")
        if not any(target.is_relative_to(place) for place in allowed):
            raise CheckpointError(
                f"{folder}: {path.name} links to {target}, outside the checkpoint",
                f"put the file itself there: cp --remove-destination {target} {path}",
            )


def _refuse_quantized(folder: Path, config: dict[str, Any]) -> None:
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]  # text_config and the like
    for part in parts:
        for key in ("quantization_config", "compression_config"):
            if found := part.get(key):
                method = found.get("quant_method", "?") if isinstance(found, dict) else "?"
                raise already_quantized(folder, f"{key} of config.json: {method}", method)
    for name, maker in _QUANTIZED_FILES.items():
        if (folder / name).exists():
            raise already_quantized(folder, f"{name} of {maker}", maker)


def already_quantized(folder: Path, sign: str, method: str = "") -> CheckpointError:
    """The error for a checkpoint that was quantised before it came here, with the way out for its method."""
    way = _DEQUANTIZE.get(str(method), "")
    return CheckpointError(
        f"{folder}: already quantised ({sign}); quantising twice adds up both losses",
        f"{way} give the checkpoint that the fine-tune wrote, before quantisation".strip(),
    )


def _shards(folder: Path) -> tuple[tuple[Path, ...], dict[str, str] | None]:
    there = {path.name for path in folder.glob("*.safetensors") if not path.name.startswith(_COPIES)}
    if not there:
        raise _no_safetensors(folder)
    if not (folder / INDEX).exists():
        if there != {WEIGHTS}:
            names = ", ".join(sorted(there - {WEIGHTS})[:3])
            raise CheckpointError(
                f"{folder}: no {INDEX}, but files that only an index explains: {names}",
                f"copy the index too, or save one {WEIGHTS}: model.save_pretrained(folder)",
            )
        return (folder / WEIGHTS,), None
    index = read_settings(folder / INDEX).get("weight_map")
    if not isinstance(index, dict) or not index or not all(isinstance(name, str) for name in index.values()):
        raise CheckpointError(f"{folder}: {INDEX} has no weight_map from tensors to files", "copy the index again")
    for tensor, name in index.items():
        if PurePosixPath(name).name != name or "\\" in name or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{folder}: the index sends {tensor} to {name!r}, which is no safetensors file of this folder",
                "never load this folder: an index names files beside it and nothing else",
            )
    named = set(index.values())
    if missing := sorted(named - there):
        raise CheckpointError(f"{folder}: the index names {missing[0]}, which is missing", "copy all shards")
    if extra := sorted(there - named):
        raise CheckpointError(
            f"{folder}: {extra[0]} is not in {INDEX}, so it is unclear which weights count",
            "move the file away if it is left over from an earlier save; otherwise save the checkpoint again",
        )
    return tuple(folder / name for name in sorted(named)), index


def _no_safetensors(folder: Path) -> CheckpointError:
    if ggufs := sorted(path.name for path in folder.glob("*.gguf")):
        return CheckpointError(
            f"{folder}: no safetensors file, only {', '.join(ggufs)}",
            "give the checkpoint that the GGUF was made from (most GGUF files are quantised), or convert it: "
            "AutoModelForCausalLM.from_pretrained(folder, gguf_file=NAME).save_pretrained(other)",
        )
    pickles = sorted({path.name for pattern in _PICKLES for path in folder.glob(pattern)})
    found = f"only {', '.join(pickles)}" if pickles else "no weights at all"
    return CheckpointError(
        f"{folder}: no safetensors file, {found}",
        "pickle files can run code and are never read here; if you trust their origin, convert them once: "
        "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(other)",
    )


def _code(folder: Path, config: dict[str, Any], trust_remote_code: bool) -> tuple[Path, ...]:
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        settings = config if name == "config.json" else read_settings(folder / name)
        if "auto_map" not in settings:
            continue
        if not trust_remote_code:
            raise CheckpointError(
                f"{folder}: {name} asks to run code from the checkpoint (auto_map)",
                "read that code, then set model.trust_remote_code: true",
            )
        if "--" in json.dumps(settings["auto_map"]):
            raise CheckpointError(
                f"{folder}: auto_map of {name} asks for code of another repository, which can change any time",
                "copy those .py files into the checkpoint and drop the part before `--`",
            )
    return tuple(sorted(folder.glob("*.py"))) if trust_remote_code else ()
