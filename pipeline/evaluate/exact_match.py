"""Exact match: the answer is the reference, but for Unicode form and outer space."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import ClassVar

from pipeline.evaluate.base import BinaryMetric
from pipeline.evaluate.text import normalized
from pipeline.records import Item


@dataclass(frozen=True)
class ExactMatch(BinaryMetric):
    """``ignore_case_and_punctuation: true`` compares words only."""

    name: ClassVar[str] = "exact_match"
    ignore_case_and_punctuation: bool = False

    def right(self, answer: str, item: Item) -> bool:
        """Whether both texts are the same after normalisation."""
        if self.ignore_case_and_punctuation:
            return normalized(answer) == normalized(item.reference)
        one, other = (unicodedata.normalize("NFC", text).strip() for text in (answer, item.reference))
        return one == other
