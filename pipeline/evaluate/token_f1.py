"""Token F1: harmonic mean of word precision and recall, the measure of SQuAD (Rajpurkar et al. 2016)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

from pipeline.evaluate.base import ItemMetric
from pipeline.evaluate.text import words
from pipeline.records import Item


@dataclass(frozen=True)
class TokenF1(ItemMetric):
    """Words as a bag, after normalisation."""

    name: ClassVar[str] = "token_f1"

    def value(self, answer: str, item: Item) -> float:
        """F1 of the two bags; two empty texts agree, one empty text scores 0."""
        mine, theirs = Counter(words(answer)), Counter(words(item.reference))
        if not mine or not theirs:
            return float(mine == theirs)
        shared = (mine & theirs).total()
        return 2 * shared / (mine.total() + theirs.total())
