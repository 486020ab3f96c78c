"""chrF: character n-gram F-score (Popović 2015), sacrebleu's counts, the formula on arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from pipeline.evaluate.base import Floats, Kind, Metric, sacrebleu_signature, sacrebleu_statistics
from pipeline.records import Item

BETA = 2


@dataclass(frozen=True)
class Chrf(Metric):
    """chrF2; ``word_order: 2`` makes it chrF++."""

    name: ClassVar[str] = "chrf"
    kind: ClassVar[Kind] = "corpus"
    word_order: int = 0
    lowercase: bool = False

    def _metric(self) -> Any:
        from sacrebleu.metrics.chrf import CHRF

        return CHRF(word_order=self.word_order, lowercase=self.lowercase, beta=BETA)

    def signature(self) -> str:
        """sacrebleu's signature."""
        return sacrebleu_signature(self._metric())

    def statistics(self, answers: Sequence[str], items: Sequence[Item]) -> Floats:
        """Shape [items, 3 * orders]: for each order n-grams of the answer, of the reference, matched."""
        return sacrebleu_statistics(self._metric(), answers, items)

    def score(self, totals: Floats) -> Floats:
        """Shape [..., 3 * orders] to [...]: F2 of precision and recall averaged over the orders in use."""
        answer, reference, matched = totals[..., 0::3], totals[..., 1::3], totals[..., 2::3]
        used = (answer > 0) & (reference > 0)
        orders = np.maximum(used.sum(axis=-1), 1)
        precision = np.where(used, matched / np.where(used, answer, 1.0), 0.0).sum(axis=-1) / orders
        recall = np.where(used, matched / np.where(used, reference, 1.0), 0.0).sum(axis=-1) / orders
        weighted = BETA**2 * precision + recall
        return np.asarray(100.0 * (1 + BETA**2) * precision * recall / np.where(weighted > 0, weighted, 1.0))

    def undefined(self, totals: Floats) -> str | None:
        """Without any character in the references there is nothing to recall."""
        return None if totals[1] > 0 else "the references hold no character"
