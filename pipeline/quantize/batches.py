"""Which samples go through the model together: batches under a token budget, shared between ranks.

A plan depends on the lengths of the samples and on the budget alone, never on the number of ranks: the same batches
meet the model whoever runs them, so the maxima over them are equal to the last bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


class Samples:
    """Token ids of all samples in one array: four bytes a token, where lists of Python integers take about forty."""

    def __init__(self, rows: Iterable[Sequence[int]]) -> None:
        found = [np.asarray(row, dtype=np.int32) for row in rows]
        self.lengths: NDArray[np.int64] = np.array([len(row) for row in found], dtype=np.int64)
        self._starts = np.cumsum(self.lengths) - self.lengths
        self._flat = np.concatenate(found) if found else np.empty(0, np.int32)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, place: int) -> NDArray[np.int32]:
        start = self._starts[place]
        return self._flat[start : start + self.lengths[place]]

    @property
    def tokens(self) -> int:
        """How many tokens there are in all samples."""
        return len(self._flat)

    def digest(self) -> str:
        """``sha256:`` over the lengths and the token ids, in order."""
        found = hashlib.sha256(self.lengths.tobytes())
        found.update(self._flat.tobytes())
        return "sha256:" + found.hexdigest()


@dataclass(frozen=True)
class Batch:
    """The ``places`` of its samples, their ``tokens`` together, and the ``longest`` of them."""

    places: tuple[int, ...]
    tokens: int
    longest: int

    @property
    def size(self) -> int:
        """What the budget counts: as many rows as samples, each as long as the longest."""
        return len(self.places) * self.longest


def plan(lengths: Sequence[int] | NDArray[np.int64], budget: int, equal: bool = False) -> list[Batch]:
    """Every sample exactly once, longest first, so that memory runs out at once or never.

    A batch's ``size`` stays within ``budget`` tokens, or it is a single longer sample. ``equal``: only samples of one
    length share a batch.
    """
    found: list[Batch] = []
    places: list[int] = []
    tokens = longest = 0
    for place in np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable").tolist():
        length = int(lengths[place])
        if places and ((len(places) + 1) * longest > budget or (equal and length != longest)):
            found.append(Batch(tuple(places), tokens, longest))
            places, tokens = [], 0
        longest = length if not places else longest
        places.append(place)
        tokens += length
    if places:
        found.append(Batch(tuple(places), tokens, longest))
    return found


def split(batch: Batch, lengths: NDArray[np.int64], budget: int) -> list[Batch]:
    """The same samples in batches within ``budget``, in the same order."""
    if batch.size <= budget or len(batch.places) == 1:
        return [batch]
    parts = plan(lengths[list(batch.places)], budget)
    return [Batch(tuple(batch.places[place] for place in part.places), part.tokens, part.longest) for part in parts]


def share(batches: Sequence[Batch], numbers: Iterable[int], ranks: int) -> list[list[int]]:
    """The ``numbers`` of batches that each rank runs: the largest goes to the rank with the fewest tokens so far."""
    loads = [0] * ranks
    found: list[list[int]] = [[] for _ in range(ranks)]
    for number in sorted(numbers, key=lambda number: (-batches[number].tokens, number)):
        rank = loads.index(min(loads))
        loads[rank] += batches[number].tokens
        found[rank].append(number)
    return [sorted(rank) for rank in found]
