"""ROUGE-L: F1 over the longest common subsequence of words (Lin 2004), without stemming."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from pipeline.evaluate.base import ItemMetric
from pipeline.evaluate.text import words
from pipeline.records import Item


@dataclass(frozen=True)
class RougeL(ItemMetric):
    """Word order counts: the longest common subsequence against both lengths."""

    name: ClassVar[str] = "rouge_l"

    def value(self, answer: str, item: Item) -> float:
        """F1 = 2 LCS / (answer words + reference words); two empty texts agree."""
        mine, theirs = words(answer), words(item.reference)
        if not mine or not theirs:
            return float(mine == theirs)
        return 2 * _common_subsequence(mine, theirs) / (len(mine) + len(theirs))


def _common_subsequence(one: Sequence[str], other: Sequence[str]) -> int:
    lengths = [0] * (len(other) + 1)
    for word in one:
        previous = 0
        for place, candidate in enumerate(other, start=1):
            above = lengths[place]
            lengths[place] = previous + 1 if word == candidate else max(above, lengths[place - 1])
            previous = above
    return lengths[-1]
