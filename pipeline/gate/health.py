"""Answers that show a broken run rather than a bad model: counted for each arm."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pipeline.records import Record

SYMPTOMS = ("truncated", "empty", "degenerate", "replacement")
REPEATED = 8  # one token this often, and nothing else, is no language


def health(records: Iterable[Record], references: Mapping[str, str]) -> dict[str, list[str]]:
    """Item ids for each symptom: ended by length; empty (or null) although the reference is not; one token over and
    over; U+FFFD in the text although the reference has none."""
    found: dict[str, list[str]] = {symptom: [] for symptom in SYMPTOMS}
    for record in records:
        reference = references.get(record.id, "")
        text = record.text if isinstance(record.text, str) else ""
        if record.finish_reason == "length":
            found["truncated"].append(record.id)
        if not text.strip() and reference.strip():
            found["empty"].append(record.id)
        if len(record.output_token_ids) >= REPEATED and len(set(record.output_token_ids)) == 1:
            found["degenerate"].append(record.id)
        if "\ufffd" in text and "\ufffd" not in reference:
            found["replacement"].append(record.id)
    return found
