"""What an arm leaves behind: one record an item, its timing kept apart, and a description of the arm.

Records are reproducible and are what the gate reads; timings never are, so they live in a file of their own.

    artifacts/answers/<arm>/records.jsonl   Record, sorted by item id
    artifacts/answers/<arm>/timings.jsonl   Timing
    artifacts/answers/<arm>/scores.jsonl    Score, where the arm scored the references
    artifacts/answers/<arm>/arm.json        Arm
    calib_data/eval.jsonl                   Item
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipeline.errors import InputError
from pipeline.files import read_json, read_jsonl, write_json, write_jsonl


@dataclass(frozen=True)
class Item:
    """One evaluation item: its prompt as token ids and its reference answer."""

    id: str
    source: str
    reference: str
    prompt_token_ids: tuple[int, ...]
    group: str | None = None
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Record:
    """One item's answer on one arm. ``finish_reason`` is ``stop`` or ``length``."""

    id: str
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    text: str
    finish_reason: str


@dataclass(frozen=True)
class Timing:
    """Seconds of one request, from the moment it was sent. ``first_token_s`` is None without streaming."""

    id: str
    first_token_s: float | None
    total_s: float
    output_tokens: int


@dataclass(frozen=True)
class Score:
    """The log-probability (nats) that an arm gives to each token of an item's reference answer."""

    id: str
    log_probs: tuple[float, ...]


@dataclass(frozen=True)
class Arm:
    """What answered: everything that must be equal between arms, and what tells them apart.

    ``role`` is ``baseline``, ``repeat`` (the baseline again, another order), ``runtime`` (the engine without
    quantisation) or ``candidate``. ``engine_digest`` is that of the manifest (None for the baseline).
    ``sampling`` holds temperature, max_new_tokens and stop_token_ids. ``platform`` is what ran it.
    """

    name: str
    role: str
    backend: str
    dtype: str
    engine_digest: str | None
    tokenizer_fingerprint: str
    template_fingerprint: str
    sampling: dict[str, Any]
    versions: dict[str, str]
    platform: dict[str, Any]
    order_seed: int
    recipe: str | None = None
    wall_s: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)


def write_answers(
    folder: Path, arm: Arm, records: list[Record], timings: list[Timing], scores: list[Score] | None = None
) -> None:
    """Writes one arm's files; each is whole or absent, ``arm.json`` comes last. No scores, no ``scores.jsonl``."""
    (folder / "scores.jsonl").unlink(missing_ok=True)  # those of an earlier run
    if scores:
        write_jsonl(folder / "scores.jsonl", (asdict(score) for score in sorted(scores, key=lambda s: s.id)))
    write_jsonl(folder / "records.jsonl", (asdict(record) for record in sorted(records, key=lambda r: r.id)))
    write_jsonl(folder / "timings.jsonl", (asdict(timing) for timing in sorted(timings, key=lambda t: t.id)))
    write_json(folder / "arm.json", asdict(arm))


def read_records(folder: Path) -> list[Record]:
    """The records of an arm, in the file's order (duplicates are kept: the gate judges them)."""
    path = folder / "records.jsonl"
    rows = read_jsonl(path)
    try:
        return [
            Record(
                id=row["id"],
                prompt_token_ids=tuple(row["prompt_token_ids"]),
                output_token_ids=tuple(row["output_token_ids"]),
                text=row["text"],
                finish_reason=row["finish_reason"],
            )
            for row in rows
        ]
    except (KeyError, TypeError) as error:
        raise InputError(f"{path}: a record lacks {error}", "run `dvc repro` again to rewrite it") from error


def read_timings(folder: Path) -> list[Timing]:
    """The timings of an arm."""
    return [Timing(**row) for row in read_jsonl(folder / "timings.jsonl")]


def read_scores(folder: Path) -> list[Score]:
    """The scores of an arm; none when it was not asked for any."""
    path = folder / "scores.jsonl"
    return [Score(row["id"], tuple(row["log_probs"])) for row in read_jsonl(path)] if path.exists() else []


def read_arm(folder: Path) -> Arm:
    """The description of an arm."""
    return Arm(**read_json(folder / "arm.json"))


def write_items(path: Path, items: list[Item]) -> None:
    """Writes the evaluation set."""
    write_jsonl(path, (asdict(item) for item in items))


def read_items(path: Path) -> list[Item]:
    """Reads the evaluation set."""
    return [
        Item(
            id=row["id"],
            source=row["source"],
            reference=row["reference"],
            prompt_token_ids=tuple(row["prompt_token_ids"]),
            group=row["group"],
            tags=tuple(row["tags"]),
        )
        for row in read_jsonl(path)
    ]
