"""Answers that differ between two arms: how many, which way, and the worst of them word by word."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from pipeline.records import Item, Record

Piece = tuple[str, bool]  # a stretch of text, and whether it differs


@dataclass(frozen=True)
class _Change:
    item: Item
    before: float  # chrF of the first arm's answer
    after: float

    @property
    def gain(self) -> float:
        return self.after - self.before


def changed_answers(
    items: Sequence[Item], one: Sequence[Record], other: Sequence[Record], examples: int
) -> dict[str, Any]:
    """Counts of changed answers and the ``examples`` whose sentence chrF fell most, as JSON data.

    Only items that both arms answered are compared: whether that is allowed is the gate's question.
    """
    before, after = ({record.id: _text(record) for record in records} for records in (one, other))
    common = [item for item in items if item.id in before and item.id in after]
    changed = [item for item in common if before[item.id] != after[item.id]]
    rows = [
        _Change(item, _chrf(before[item.id], item.reference), _chrf(after[item.id], item.reference)) for item in changed
    ]
    rows.sort(key=lambda row: (row.gain, row.item.id))
    return {
        "items": len(common),
        "changed": len(changed),
        "worse": sum(row.gain < 0 for row in rows),
        "better": sum(row.gain > 0 for row in rows),
        "examples": [_example(row, before, after) for row in rows[:examples]],
    }


def word_differences(one: str, other: str) -> tuple[list[Piece], list[Piece]]:
    """Both texts in pieces, those words marked that the other text lacks at this place."""
    left, right = re.findall(r"\s*\S+", one), re.findall(r"\s*\S+", other)
    plain = [word.strip() for word in left], [word.strip() for word in right]
    pieces: tuple[list[Piece], list[Piece]] = [], []
    for tag, start, end, from_, to in SequenceMatcher(None, *plain, autojunk=False).get_opcodes():
        for place, text in enumerate(("".join(left[start:end]), "".join(right[from_:to]))):
            if text:
                pieces[place].append((text, tag != "equal"))
    return pieces


def _example(row: _Change, before: dict[str, str], after: dict[str, str]) -> dict[str, Any]:
    item = row.item
    one, other = word_differences(before[item.id], after[item.id])
    return {
        "id": item.id,
        "source": item.source,
        "reference": item.reference,
        "baseline": before[item.id],
        "engine": after[item.id],
        "baseline_pieces": one,
        "engine_pieces": other,
        "baseline_chrf": row.before,
        "engine_chrf": row.after,
    }


def _text(record: Record) -> str:
    return record.text if isinstance(record.text, str) else ""  # a null answer makes the verdict INVALID


def _chrf(answer: str, reference: str) -> float:
    from sacrebleu import sentence_chrf

    return float(sentence_chrf(answer, [reference]).score)
