"""Corpus BLEU: sacrebleu counts the n-grams, the formula runs on arrays of summed counts.

Papineni et al. 2002, with the exponential smoothing of mteval-v13a that is sacrebleu's default.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from pipeline.evaluate.base import Floats, Kind, Metric, sacrebleu_signature, sacrebleu_statistics
from pipeline.records import Item

ORDER = 4


@dataclass(frozen=True)
class Bleu(Metric):
    """BLEU. ``tokenize``: 13a, zh, char, intl, ... as sacrebleu names them (13a scores Chinese 0)."""

    name: ClassVar[str] = "bleu"
    kind: ClassVar[Kind] = "corpus"
    tokenize: str = "13a"
    lowercase: bool = False

    def _metric(self) -> Any:
        from sacrebleu.metrics.bleu import BLEU

        if self.tokenize not in BLEU.TOKENIZERS:
            raise ValueError(f"tokenize: {self.tokenize!r} is none of {', '.join(sorted(BLEU.TOKENIZERS))}")
        return BLEU(tokenize=self.tokenize, lowercase=self.lowercase, force=True)

    def signature(self) -> str:
        """sacrebleu's signature."""
        return sacrebleu_signature(self._metric())

    def statistics(self, answers: Sequence[str], items: Sequence[Item]) -> Floats:
        """Shape [items, 10]: answer length, reference length, 4 matched and 4 possible n-gram counts."""
        return sacrebleu_statistics(self._metric(), answers, items)

    def score(self, totals: Floats) -> Floats:
        """Shape [..., 10] to [...]. 0 when no n-gram matches, or when there is no 4-gram at all."""
        length, reference = totals[..., 0], totals[..., 1]
        correct, possible = totals[..., 2 : 2 + ORDER], totals[..., 2 + ORDER :]
        scored = (possible > 0).all(axis=-1) & (correct > 0).any(axis=-1)
        unmatched = correct == 0
        # The k-th order without a match counts as 1 / 2**k matches.
        matched = np.where(unmatched, 0.5 ** np.cumsum(unmatched, axis=-1), correct)
        precision = matched / np.where(possible > 0, possible, 1.0)
        shortness = 1.0 - reference / np.where(length > 0, length, 1.0)
        brevity = np.where(length > 0, np.exp(np.minimum(0.0, shortness)), 0.0)
        return np.asarray(np.where(scored, 100.0 * brevity * np.exp(np.log(precision).mean(axis=-1)), 0.0))

    def undefined(self, totals: Floats) -> str | None:
        """Texts of under four tokens hold no 4-gram: BLEU is then 0 whatever the texts say."""
        if totals[1] == 0:
            return "the references hold no token"
        return None if totals[-1] > 0 else f"no answer has {ORDER} tokens, so there is no {ORDER}-gram to count"
