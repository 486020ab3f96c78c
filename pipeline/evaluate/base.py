"""What a metric is: how an answer becomes numbers, apart from how summed numbers become a score.

The split is sacrebleu's, and it is what makes the bootstrap fast and generic: ``statistics`` runs once an
item (slow, Python), ``score`` runs on sums of statistics (fast, NumPy, any leading shape). A resample of
the evaluation set is then one matrix product. Scores are on a scale of 0 to 100 everywhere.

Nothing here reads a file, a clock or a GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from pipeline.records import Item

Floats = NDArray[np.float64]
Kind = Literal["corpus", "item", "binary"]


class Metric(ABC):
    """One metric. Subclasses are frozen dataclasses whose fields are the options of ``policy.yaml``.

    ``kind`` says which interval fits: ``corpus`` (the score is not a mean over items: paired bootstrap),
    ``item`` (a mean of item scores: paired bootstrap) or ``binary`` (right or wrong: a score interval).
    """

    name: ClassVar[str]
    kind: ClassVar[Kind]
    higher_is_better: ClassVar[bool] = True

    @abstractmethod
    def signature(self) -> str:
        """Everything that must be equal before two scores may be compared, as one line."""

    @abstractmethod
    def statistics(self, answers: Sequence[str], items: Sequence[Item]) -> Floats:
        """Sufficient statistics, shape [items, k]; ``answers[i]`` answers ``items[i]``."""

    @abstractmethod
    def score(self, totals: Floats) -> Floats:
        """Scores of summed statistics: shape [..., k] to [...], from 0 to 100."""

    def undefined(self, totals: Floats) -> str | None:
        """Why the score of these summed statistics (shape [k]) means nothing, or None when it is sound."""
        return None if totals[-1] > 0 else "no items"


class MeanMetric(Metric):
    """A metric whose score is the mean of one value an item; its statistics are (value, 1)."""

    @abstractmethod
    def value(self, answer: str, item: Item) -> float:
        """The item's score, from 0 to 1."""

    def signature(self) -> str:
        """The metric's name and its options."""
        options = "|".join(f"{key}:{value}" for key, value in sorted(vars(self).items()))
        return f"{self.name}|{options}" if options else self.name

    def statistics(self, answers: Sequence[str], items: Sequence[Item]) -> Floats:
        """Shape [items, 2]: the value and 1."""
        values = [self.value(answer, item) for answer, item in zip(answers, items, strict=True)]
        return np.column_stack([np.asarray(values, dtype=np.float64), np.ones(len(values))])

    def score(self, totals: Floats) -> Floats:
        """100 times the mean; 0 without items."""
        count = totals[..., 1]
        return np.asarray(100.0 * totals[..., 0] / np.where(count > 0, count, 1.0))


class ItemMetric(MeanMetric):
    """Any value between 0 and 1 an item."""

    kind: ClassVar[Kind] = "item"


class BinaryMetric(MeanMetric):
    """Right or wrong, item by item."""

    kind: ClassVar[Kind] = "binary"

    @abstractmethod
    def right(self, answer: str, item: Item) -> bool:
        """Whether the answer is right."""

    def value(self, answer: str, item: Item) -> float:
        """1 when right."""
        return float(self.right(answer, item))


def sacrebleu_statistics(metric: Any, answers: Sequence[str], items: Sequence[Item]) -> Floats:
    """Per-segment statistics from a sacrebleu metric, shape [items, k], one reference an item."""
    if not items:
        return np.zeros((0, 1))
    references = [[item.reference for item in items]]
    return np.asarray(metric._extract_corpus_statistics(list(answers), references), dtype=np.float64)


def sacrebleu_signature(metric: Any) -> str:
    """sacrebleu's signature: it names the tokenizer, case, smoothing and version."""
    metric.num_refs = 1
    return f"{type(metric).__name__}|{metric.get_signature()}"
