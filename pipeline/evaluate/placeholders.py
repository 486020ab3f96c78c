"""Placeholder preservation: what must pass through a translation unchanged is still there, as often."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

from pipeline.evaluate.base import BinaryMetric
from pipeline.records import Item


@dataclass(frozen=True)
class Placeholders(BinaryMetric):
    """``pattern`` finds ``{name}``, ``%s``, ``%(name)s``, ``<tag>`` and ``${name}`` by default."""

    name: ClassVar[str] = "placeholders"
    pattern: str = r"\$?\{[^{}]*\}|%(?:\(\w+\))?[sdif]|</?\w+[^<>]*>"

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"pattern: not a regular expression: {error}") from error

    def right(self, answer: str, item: Item) -> bool:
        """Whether the answer holds the source's placeholders, each as often as the source."""
        return self._found(answer) == self._found(item.source)

    def _found(self, text: str) -> Counter[str]:
        return Counter(match[0] for match in re.finditer(self.pattern, text))
