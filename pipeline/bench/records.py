"""The files of a bench.

    artifacts/bench/<arm>/bench.json        what was benched, how, and the numbers of every run (docs/bench.md)
    artifacts/bench/<arm>/requests.jsonl    every request: times, tokens, failure
    artifacts/bench/<arm>/telemetry.jsonl   every sample of the server and the machine
    artifacts/bench/bench.json              the arms in the order in which their servers ran

All times in the two lists are seconds from the start of their run; ``run`` is its place in ``runs`` of bench.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.bench.drive import Sample
from pipeline.bench.telemetry import Snapshot
from pipeline.files import read_json, write_json, write_jsonl

FOLDER = Path("artifacts/bench")
FILE = "bench.json"
SCHEMA = 1
DIGITS = 6  # of a second


@dataclass(frozen=True)
class Run:
    """One load on one server: its numbers, and what they were made from."""

    numbers: dict[str, Any]
    samples: Sequence[Sample]
    snapshots: Sequence[Snapshot]
    start: float  # on the clock of the snapshots


@dataclass
class ArmBench:
    """One arm's runs so far. ``about`` says what was benched; on how many devices, its servers told."""

    about: dict[str, Any]
    runs: list[Run] = field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        """The content of bench.json."""
        devices = max((run.numbers["server"]["devices"] for run in self.runs), default=1)
        return {"schema": SCHEMA, **self.about, "devices": devices, "runs": [run.numbers for run in self.runs]}


def write_bench(folder: Path, arms: dict[str, ArmBench], order: Sequence[str]) -> None:
    """Writes every arm's files into ``folder``. ``order`` names the arms as their servers ran."""
    for name, arm in arms.items():
        write_jsonl(folder / name / "requests.jsonl", _requests(arm))
        write_jsonl(folder / name / "telemetry.jsonl", _telemetry(arm))
        write_json(folder / name / FILE, arm.plain())
    write_json(folder / FILE, {"schema": SCHEMA, "arms": list(arms), "order": list(order)})


def read_bench(root: Path, name: str) -> dict[str, Any] | None:
    """An arm's bench.json under the project's ``root``; None when it was not benched."""
    path = root / FOLDER / name / FILE
    return dict(read_json(path)) if path.exists() else None


def _requests(arm: ArmBench) -> Iterator[dict[str, Any]]:
    for place, run in enumerate(arm.runs):
        for sample in sorted(run.samples, key=lambda sample: sample.due_s):
            first, last = (sample.tokens_s[0], sample.tokens_s[-1]) if sample.tokens_s else (None, None)
            yield {
                "run": place,
                "item": sample.item,
                "prompt_tokens": sample.prompt_tokens,
                "due_s": round(sample.due_s, DIGITS),
                "sent_s": round(sample.sent_s, DIGITS),
                "first_s": None if first is None else round(sample.sent_s + first, DIGITS),
                "last_s": None if last is None else round(sample.sent_s + last, DIGITS),
                "end_s": round(sample.end_s, DIGITS),
                "output_tokens": len(sample.tokens_s),
                "failure": sample.failure or None,
                "burst": sample.burst,
            }


def _telemetry(arm: ArmBench) -> Iterator[dict[str, Any]]:
    for place, run in enumerate(arm.runs):
        for snapshot in run.snapshots:
            yield {"run": place, **snapshot.plain(run.start)}
