"""Optimisation profiles: for which shapes TensorRT tunes its kernels, made from the graph's own dynamic axes.

One profile reads prompts (``prefill``); one for each batch bucket decodes (``decode_8``: batches up to 8, tuned for
8). An axis is known by the name that it has in the ONNX graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Range = tuple[int, int, int]  # smallest, tuned for, largest


@dataclass(frozen=True)
class Profile:
    """``name``; the batch sizes that it takes; ``shapes``: input name -> (smallest, tuned for, largest) shape."""

    name: str
    batch: Range
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]


def ranges(kind: str, batch: Range, max_tokens: int) -> dict[str, Range]:
    """Axis name -> its range. ``kind`` is ``prefill`` or ``decode``. A graph with other axes adds its rows here."""
    typical = max(1, max_tokens // 2)
    if kind == "prefill":
        return {
            "batch": batch,
            "sequence": (1, min(128, max_tokens), max_tokens),
            "past": (0, 0, max_tokens),
            "total": (1, min(128, max_tokens), max_tokens),
            "kept": (1, 1, max_tokens),
        }
    return {
        "batch": batch,
        "sequence": (1, 1, 1),
        "past": (0, typical, max_tokens),
        "total": (1, typical, max_tokens),
        "kept": (1, 1, 1),
    }


def make_profiles(
    inputs: Mapping[str, Sequence[int | str]], *, max_batch: int, max_tokens: int, buckets: Sequence[int]
) -> list[Profile]:
    """Profiles for graph ``inputs`` (name -> dimensions: a size, or the axis' name): prefill first, then decode
    profiles by rising batch. The last bucket is always ``max_batch``. Raises KeyError for an axis without a range."""
    raise NotImplementedError
