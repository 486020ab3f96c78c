"""TER: edits (with shifts) for each reference word (Snover et al. 2006), counted by sacrebleu. Lower is better."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from pipeline.evaluate.base import Floats, Kind, Metric, sacrebleu_signature, sacrebleu_statistics
from pipeline.records import Item


@dataclass(frozen=True)
class Ter(Metric):
    """Translation edit rate, in edits for 100 reference words (it may exceed 100)."""

    name: ClassVar[str] = "ter"
    kind: ClassVar[Kind] = "corpus"
    higher_is_better: ClassVar[bool] = False
    normalized: bool = False
    case_sensitive: bool = False

    def _metric(self) -> Any:
        from sacrebleu.metrics.ter import TER

        return TER(normalized=self.normalized, case_sensitive=self.case_sensitive)

    def signature(self) -> str:
        """sacrebleu's signature."""
        return sacrebleu_signature(self._metric())

    def statistics(self, answers: Sequence[str], items: Sequence[Item]) -> Floats:
        """Shape [items, 2]: edits and reference words."""
        return sacrebleu_statistics(self._metric(), answers, items)

    def score(self, totals: Floats) -> Floats:
        """Shape [..., 2] to [...]. Without reference words: 100 if there is anything to delete, else 0."""
        edits, words = totals[..., 0], totals[..., 1]
        return np.asarray(100.0 * np.where(words > 0, edits / np.where(words > 0, words, 1.0), edits > 0))

    def undefined(self, totals: Floats) -> str | None:
        """Without reference words there is no rate."""
        return None if totals[1] > 0 else "the references hold no word"
