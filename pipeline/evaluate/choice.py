"""Choice accuracy: a pattern picks the answer's choice, which must be the reference's."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Literal

from pipeline.evaluate.base import BinaryMetric
from pipeline.evaluate.text import normalized
from pipeline.records import Item


@dataclass(frozen=True)
class Choice(BinaryMetric):
    """``pattern``: a regular expression; its first group (or the whole match) is the choice.

    ``take`` says which match counts. An answer in which nothing matches is wrong. The pattern is applied to
    the reference too; a reference in which nothing matches is itself the choice.
    """

    name: ClassVar[str] = "choice"
    pattern: str = r"\b([A-E])\b"
    take: Literal["first", "last"] = "last"

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"pattern: not a regular expression: {error}") from error
        if self.take not in ("first", "last"):
            raise ValueError("take: must be first or last")

    def right(self, answer: str, item: Item) -> bool:
        """Whether the same choice was made, but for case and punctuation."""
        chosen, wanted = self._choice(answer), self._choice(item.reference)
        if wanted is None:
            wanted = item.reference
        return chosen is not None and normalized(chosen) == normalized(wanted)

    def _choice(self, text: str) -> str | None:
        matches = list(re.finditer(self.pattern, text))
        if not matches:
            return None
        match = matches[0 if self.take == "first" else -1]
        return match[1] if match.re.groups else match[0]
