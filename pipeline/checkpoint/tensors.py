"""The tensors of a checkpoint, read once, one after the other.

A shard is mapped, never loaded: a worker holds one tensor at a time, and what it read can be dropped by the system
whenever memory is short. Shards are spread over a few threads, because hashing is what takes the time.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.checkpoint.layout import Layout, already_quantized
from pipeline.errors import CheckpointError
from pipeline.files import digest_json

FP16_MAX = 65504.0
_WORKERS = 4
# How quantisers name what they store beside, or instead of, a weight.
_QUANTIZED_NAMES = (
    *(".qweight", ".qzeros", ".g_idx", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".input_scale"),
    *(".absmax", ".quant_map", ".SCB", ".weight_format", "_amax", "_blocks", "_precompressed"),
)
_PLAIN = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class Header:
    """What a shard says of a tensor: its file, its dtype as safetensors writes it (``BF16``) and its shape."""

    path: Path
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Stored:
    """What was read: SHA-256 over a tensor's bytes, its values' number and the largest magnitude (None: no floats)."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str
    values: int
    largest: float | None


def read_headers(layout: Layout) -> dict[str, Header]:
    """Name -> header of every tensor, without reading one.

    Raises CheckpointError for a damaged or truncated shard, for a tensor that stands in two shards or not where the
    index says, and for names and dtypes that only a quantiser writes.
    """
    found: dict[str, Header] = {}
    for path in layout.shards:
        with _opened(path) as shard:
            for name in shard.keys():  # noqa: SIM118 - not a dict
                if name in found:
                    raise CheckpointError(
                        f"{layout.folder}: {name} stands in {found[name].path.name} and in {path.name}",
                        "save the checkpoint again: model.save_pretrained(folder)",
                    )
                part = shard.get_slice(name)
                found[name] = Header(path, str(part.get_dtype()), tuple(part.get_shape()))
    if layout.index is not None:
        _compare_index(layout, found)
    for name, header in found.items():
        packed = name.endswith("weight") and header.dtype not in _PLAIN
        if packed or header.dtype.startswith(("F8", "F6", "F4")) or name.endswith(_QUANTIZED_NAMES):
            raise already_quantized(layout.folder, f"{header.path.name} stores {name} as {header.dtype}")
    return found


def _compare_index(layout: Layout, found: dict[str, Header]) -> None:
    index = layout.index or {}
    for name in sorted(index.keys() | found.keys()):
        said = index.get(name)
        held = found[name].path.name if name in found else None
        if said != held:
            raise CheckpointError(
                f"{layout.folder}: the index says that {name} is in {said or 'no file'}, "
                f"but it is in {held or 'none of them'}",
                "index and shards are from different saves: copy both again",
            )


def scan_tensors(layout: Layout, headers: dict[str, Header]) -> dict[str, Stored]:
    """Reads every tensor once, with a progress bar.

    Raises CheckpointError for the first tensor (by shard) that holds a NaN or an infinity.
    """
    from tqdm import tqdm

    total = sum(path.stat().st_size for path in layout.shards)
    names: dict[Path, list[str]] = {path: [] for path in layout.shards}
    for name, header in headers.items():
        names[header.path].append(name)
    lock = threading.Lock()
    workers = min(_WORKERS, os.cpu_count() or 1, len(layout.shards))
    with (
        tqdm(total=total, desc="reading tensors", unit="B", unit_scale=True, mininterval=1) as bar,
        ThreadPoolExecutor(max_workers=workers) as pool,
    ):

        def done(size: int) -> None:
            with lock:
                bar.update(size)

        parts = pool.map(lambda path: _scan_shard(path, names[path], headers, done), layout.shards)
        return {name: stored for part in parts for name, stored in part.items()}


def _scan_shard(
    path: Path, names: list[str], headers: dict[str, Header], done: Callable[[int], None]
) -> dict[str, Stored]:
    found = {}
    with _opened(path) as shard:
        for name in names:
            tensor = shard.get_tensor(name)
            header = headers[name]
            flat = tensor.reshape(-1)
            largest = _largest(flat, name, path) if header.dtype in _PLAIN else None
            data = memoryview(flat.view(_torch().uint8).numpy())
            found[name] = Stored(header.dtype, header.shape, hashlib.sha256(data).hexdigest(), flat.numel(), largest)
            done(data.nbytes)
            del tensor, flat, data
    return found


def _largest(flat: Any, name: str, path: Path) -> float:
    torch = _torch()
    if flat.numel() == 0:
        return 0.0
    # One pass without a copy: NaN and infinities survive aminmax.
    low, high = (bound.double().item() for bound in torch.aminmax(flat))
    if not (abs(low) < float("inf") and abs(high) < float("inf")):
        bad = int((~torch.isfinite(flat)).sum())
        raise CheckpointError(
            f"{path.name}: {name}: {bad} of {flat.numel()} values are NaN or infinite",
            "the fine-tune diverged: go back to an earlier checkpoint",
        )
    return float(max(-low, high))


def weights_fingerprint(stored: dict[str, Stored]) -> str:
    """A digest over names, dtypes, shapes and bytes; the same however the tensors are spread over shards."""
    return digest_json({name: [part.dtype, list(part.shape), part.sha256] for name, part in stored.items()})


def _opened(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    with path.open("rb") as file:
        if file.read(24).startswith(b"version https://git-lfs"):
            raise CheckpointError(f"{path}: a Git LFS pointer, not the file itself", "run `git lfs pull` there")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: damaged: {error}", "copy or save the file again") from error


def _torch() -> Any:
    import torch

    return torch
