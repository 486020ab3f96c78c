"""A seeded order of a source of any size, in memory that does not grow with it.

A row's rank is a keyed hash of its text. So the order depends neither on the order of the source, nor on workers,
batches or the platform; adding rows moves no other row; and twins share a rank, which removes exact duplicates on
the way. The lowest ranks are kept while the source streams by (a bottom-k sketch); if more are asked for than were
kept, the source is read again for the next ones.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from pipeline.data.leakage import folded
from pipeline.data.rows import Row


def by_text(row: Row) -> str:
    """Twins up to case, spacing and Unicode form share a rank."""
    return folded(row.source)


def by_id(row: Row) -> str:
    """Every row has a rank of its own: frequent texts stay frequent."""
    return row.id


@dataclass
class Ranked:
    """Iterates over ``rows`` by rank; ``rows`` must be iterable more than once.

    ``keep`` is how many rows are held in memory. ``read`` is the number of rows that the source has, known once the
    iteration has begun. Of twins the one with the lowest id stands for all.
    """

    rows: Iterable[Row]
    seed: int
    purpose: str
    keep: int
    key: Callable[[Row], str] = by_text
    read: int = 0

    def __iter__(self) -> Iterator[tuple[Row, int]]:
        """Yields a row and how many twins it stands for (1: itself alone)."""
        after = -1
        while True:
            kept, copies, more = self._pass(after)
            for rank in sorted(kept):
                yield kept[rank], copies[rank]
            if not more:
                return
            after = max(kept)

    def _pass(self, after: int) -> tuple[dict[int, Row], dict[int, int], bool]:
        from tqdm import tqdm

        kept: dict[int, Row] = {}
        copies: dict[int, int] = {}
        largest_first: list[int] = []
        more, count = False, 0
        prefix = f"{self.seed}/{self.purpose}/"
        for row in tqdm(self.rows, desc=f"reading {self.purpose} rows", unit="row", mininterval=2):
            count += 1
            text = prefix + self.key(row)
            rank = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest())
            if rank <= after:
                continue
            if rank in kept:
                copies[rank] += 1
                if row.id < kept[rank].id:
                    kept[rank] = row
                continue
            if len(kept) < self.keep:
                heapq.heappush(largest_first, -rank)
            else:
                more = True
                if rank > -largest_first[0]:
                    continue
                gone = -heapq.heapreplace(largest_first, -rank)
                del kept[gone], copies[gone]
            kept[rank], copies[rank] = row, 1
        self.read = count
        return kept, copies, more
