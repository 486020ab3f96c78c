"""JSON validity: the answer parses as JSON and, when asked, holds the reference's keys."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, ClassVar

from pipeline.evaluate.base import BinaryMetric
from pipeline.records import Item


@dataclass(frozen=True)
class JsonValid(BinaryMetric):
    """``same_keys: true`` also wants an object with exactly the top-level keys of the reference."""

    name: ClassVar[str] = "json_valid"
    same_keys: bool = False

    def right(self, answer: str, item: Item) -> bool:
        """Strict JSON: NaN and Infinity, which Python would accept, are wrong."""
        try:
            value = _parse(answer)
            if not self.same_keys:
                return True
            wanted = _parse(item.reference)
        except (ValueError, RecursionError):
            return False
        return isinstance(value, dict) and isinstance(wanted, dict) and value.keys() == wanted.keys()


def _parse(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
