"""The calibration sample and the evaluation set: deduplicated, disjoint, seeded.

The order of candidates is a keyed hash of their ids: it does not depend on the order of the source, on
workers or on the platform, and adding rows moves no other row.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.data.leakage import normalized, overlaps
from pipeline.data.prompts import PromptTemplate
from pipeline.data.sources import Row
from pipeline.errors import DataError
from pipeline.files import read_jsonl, write_jsonl
from pipeline.params import Params
from pipeline.records import Item


@dataclass(frozen=True)
class Sampled:
    """Both sets, and what was left out on the way to them (counts for the data card)."""

    calibration: list[dict[str, Any]]
    evaluation: list[Item]
    counts: dict[str, int]
    overlaps: dict[str, str]


def sample(params: Params, calib_rows: list[Row], eval_rows: list[Row], tokenizer: Any) -> Sampled:
    """Draws both sets. Raises DataError when either would be empty, or an id stands twice.

    Calibration samples longer than ``calib.max_tokens`` and items that the engine could not take are left out
    whole and counted; nothing is ever cut.
    """
    template = PromptTemplate(params.prompt.template, params.prompt.user, params.prompt.system)
    counts: dict[str, int] = {"calib_rows": len(calib_rows), "eval_rows": len(eval_rows)}
    evaluation = _evaluation(params, eval_rows, template, tokenizer, counts)
    candidates = _unique(_ordered(calib_rows, params.seed, "calib"), counts, "calib")
    found = overlaps({item.id: item.source for item in evaluation}, {row.id: row.source for row in candidates})
    leaked = set(found.values())
    counts["calib_left_out_overlap"] = len(leaked)
    calibration: list[dict[str, Any]] = []
    too_long = 0
    for row in candidates:
        if len(calibration) == params.calib.samples:
            break
        if row.id in leaked:
            continue
        ids = template.token_ids(tokenizer, row.source)
        if params.calib.answers:
            ids = ids + list(tokenizer(row.target, add_special_tokens=False)["input_ids"])
        if len(ids) > params.calib.max_tokens:
            too_long += 1
            continue
        calibration.append({"id": row.id, "source": row.source, "token_ids": ids})
    counts["calib_left_out_too_long"] = too_long
    counts["calib_asked"], counts["calib_used"] = params.calib.samples, len(calibration)
    counts["eval_asked"], counts["eval_used"] = params.eval.samples, len(evaluation)
    if not calibration:
        raise DataError("data: no calibration sample is left", "raise calib.max_tokens or give more rows")
    # Once more over what is used: the gate reads this, and must not rely on the filter above.
    remaining = overlaps(
        {item.id: item.source for item in evaluation}, {row["id"]: row["source"] for row in calibration}
    )
    return Sampled(calibration, evaluation, counts, remaining)


def _evaluation(
    params: Params, rows: list[Row], template: PromptTemplate, tokenizer: Any, counts: dict[str, int]
) -> list[Item]:
    limit = params.engine.max_tokens - params.eval.max_new_tokens
    items: list[Item] = []
    too_long = 0
    for row in _unique(_ordered(rows, params.seed, "eval"), counts, "eval"):
        if len(items) == params.eval.samples:
            break
        words = len(row.source.split())
        if params.eval.max_words is not None and words > params.eval.max_words:
            continue
        ids = template.token_ids(tokenizer, row.source)
        if len(ids) > limit:
            too_long += 1
            continue
        items.append(Item(row.id, row.source, row.target, tuple(ids), row.group, (length_tag(len(ids)),)))
    counts["eval_left_out_too_long"] = too_long
    if not items:
        raise DataError(
            "data: the evaluation set is empty after filtering",
            "raise eval.max_words or engine.max_tokens, or give more rows",
        )
    return sorted(items, key=lambda item: item.id)


def length_tag(tokens: int) -> str:
    """The length band of a prompt, a power of two: ``len:32-63``."""
    low = 1 << (tokens.bit_length() - 1)
    return f"len:{low}-{2 * low - 1}"


def _ordered(rows: list[Row], seed: int, purpose: str) -> list[Row]:
    seen: set[str] = set()
    for row in rows:
        if row.id in seen:
            raise DataError(
                f"data: {purpose} id {row.id!r} stands twice", "make data.columns.id unique, or set it to null"
            )
        seen.add(row.id)
    return sorted(rows, key=lambda row: hashlib.sha256(f"{seed}/{purpose}/{row.id}".encode()).digest())


def _unique(rows: list[Row], counts: dict[str, int], purpose: str) -> list[Row]:
    seen: set[str] = set()
    kept = []
    for row in rows:
        key = normalized(row.source)
        if key not in seen:
            seen.add(key)
            kept.append(row)
    counts[f"{purpose}_left_out_duplicate"] = len(rows) - len(kept)
    return kept


def write_calibration(path: Path, samples: list[dict[str, Any]]) -> None:
    """Writes the calibration sample."""
    write_jsonl(path, samples)


def read_calibration(path: Path) -> list[list[int]]:
    """The token ids of the calibration sample."""
    return [row["token_ids"] for row in read_jsonl(path)]
