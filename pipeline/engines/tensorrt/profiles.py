"""Optimisation profiles: for which shapes TensorRT tunes its kernels, made from the graph's own dynamic axes.

One profile reads prompts (``prefill``); one for each batch bucket decodes (``decode_8``: batches up to 8, tuned for
8). An axis is known by the name that it has in the ONNX graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.errors import BuildError

Range = tuple[int, int, int]  # smallest, tuned for, largest
READ_ROWS = 8  # prompts in one pass: more would ask for scratch memory that steps do not need
READ_TOKENS = 1024  # of one prompt in one pass; a longer one is read in pieces


@dataclass(frozen=True)
class Profile:
    """``name``; the batch sizes that it takes; ``shapes``: input name -> (smallest, tuned for, largest) shape."""

    name: str
    batch: Range
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]

    def plain(self) -> dict[str, Any]:
        """As JSON data."""
        return asdict(self)


def ranges(kind: str, batch: Range, max_tokens: int) -> dict[str, Range]:
    """Axis name -> its range. ``kind`` is ``prefill`` or ``decode``. A graph with other axes adds its rows here."""
    typical, read = max(1, max_tokens // 2), min(READ_TOKENS, max_tokens)
    if kind == "prefill":
        new = (1, min(128, read), read)
        return {
            "batch": batch,
            # the decoder graph (graph.py)
            "new": new,
            "kept": (1, 1, max(read, batch[2])),
            "capacity": (1, 1, max_tokens),
            # the plain graph (lowering.export)
            "sequence": new,
            "past": (0, 0, max_tokens),
            "total": (1, new[1], max_tokens),
        }
    return {
        "batch": batch,
        "new": (1, 1, 1),
        "kept": batch,
        "capacity": (1, typical, max_tokens),
        "sequence": (1, 1, 1),
        "past": (0, typical, max_tokens),
        "total": (1, typical, max_tokens),
    }


def make_profiles(
    inputs: Mapping[str, Sequence[int | str]], *, max_batch: int, max_tokens: int, buckets: Sequence[int]
) -> list[Profile]:
    """Profiles for graph ``inputs`` (name -> dimensions: a size, or the axis' name): prefill first, then decode
    profiles by rising batch, of which the last always takes ``max_batch``. Raises BuildError for an unknown axis.
    """
    rows = min(READ_ROWS, max_batch)
    made = [_profile("prefill", inputs, ranges("prefill", (1, 1, rows), max_tokens), (1, 1, rows))]
    low = 1
    for bucket in sorted({*(one for one in buckets if one < max_batch), max_batch}):
        batch = (low, bucket, bucket)
        made.append(_profile(f"decode_{bucket}", inputs, ranges("decode", batch, max_tokens), batch))
        low = bucket + 1
    return made


def _profile(name: str, inputs: Mapping[str, Sequence[int | str]], axes: Mapping[str, Range], batch: Range) -> Profile:
    shapes = {}
    for tensor, dimensions in inputs.items():
        if unknown := [one for one in dimensions if isinstance(one, str) and one not in axes]:
            raise BuildError(
                f"{tensor}: the graph's axis {unknown[0]!r} has no range",
                "give it one in pipeline/engines/tensorrt/profiles.py",
            )
        sizes = [axes[one] if isinstance(one, str) else (one, one, one) for one in dimensions]
        low, tuned, high = (tuple(size[place] for size in sizes) for place in range(3))
        shapes[tensor] = (low, tuned, high)
    return Profile(name, batch, shapes)
