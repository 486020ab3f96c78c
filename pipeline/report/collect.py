"""Reads a finished run into one JSON value, the content of ``report/report.json``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.files import read_json
from pipeline.params import Calib, Params
from pipeline.quantize.recipes import RECIPES, load_recipe
from pipeline.records import Arm, Item, Record, read_arm, read_items, read_records, read_timings
from pipeline.report.bench import bench_data
from pipeline.report.changes import changed_answers
from pipeline.report.speed import speed
from pipeline.report.text import folder_size
from pipeline.report.words import best_first, headline, sentence

SCHEMA = 1
SHARED_ARMS = ("baseline", "repeat", "runtime")
REPEAT_EXAMPLES = 3


def collect(root: Path, params: Params) -> dict[str, Any]:
    """The report of the run in ``root``. An arm that did not answer is left out, as in the verdicts."""
    answers = root / "artifacts/answers"
    names = [name for name in (*SHARED_ARMS, *params.recipes) if (answers / name / "arm.json").exists()]
    arms = {name: read_arm(answers / name) for name in names}
    records = {name: read_records(answers / name) for name in names}
    items = read_items(root / "calib_data/eval.jsonl")
    verdicts = {recipe: read_json(root / f"artifacts/verdicts/{recipe}.json") for recipe in params.recipes}
    words = best_first({name: verdict["verdict"] for name, verdict in verdicts.items()})
    first = next(iter(verdicts.values()))
    return {
        "schema": SCHEMA,
        "headline": headline(words),
        "recipes": [_recipe(root, name, verdicts[name], items, records) for name in words],
        "compared": _compared(root, params, items, arms),
        "arms": [
            _arm(arms[name], records[name], speed(read_timings(answers / name), arms[name].wall_s)) for name in names
        ],
        "repeat": _pair(items, records, "baseline", "repeat", REPEAT_EXAMPLES),
        "sizes": _sizes(root, arms),
        "bench": bench_data(root, {name: verdicts[name] for name in words}),
        "data": read_json(root / "calib_data/card.json"),
        "platform": read_json(root / "artifacts/platform.json"),
        "policy": {"digest": first["policy_digest"], "content": first["policy"]},
    }


def _recipe(
    root: Path, name: str, verdict: dict[str, Any], items: list[Item], records: dict[str, list[Record]]
) -> dict[str, Any]:
    manifest = root / "engines" / name / "manifest.json"
    census = root / "artifacts/quantized" / name / "census.json"
    definition = root / RECIPES / f"{name}.yaml"
    return {
        "name": name,
        "description": load_recipe(name, root / RECIPES).description if definition.exists() else "",
        "sentence": sentence(verdict),
        **{key: verdict[key] for key in ("verdict", "reasons", "engine_digest", "validity", "metrics", "ledger")},
        "fidelity": verdict["fidelity"],
        "attribution": verdict["attribution"],
        "changes": _pair(items, records, "baseline", name),
        "probe": read_json(manifest).get("build", {}).get("probe") if manifest.exists() else None,
        "census": read_json(census) if census.exists() else None,
    }


def _pair(
    items: list[Item], records: dict[str, list[Record]], one: str, other: str, examples: int = 10
) -> dict[str, Any] | None:
    if one not in records or other not in records:
        return None
    return changed_answers(items, records[one], records[other], examples)


def _compared(root: Path, params: Params, items: list[Item], arms: dict[str, Arm]) -> dict[str, Any]:
    checkpoint = read_json(root / "artifacts/checkpoint.json")
    counts = read_json(root / "calib_data/card.json")["counts"]
    baseline = arms.get("baseline")
    return {
        "model": params.model.checkpoint,
        "checkpoint": {key: checkpoint.get(key) for key in ("architecture", "parameters", "layers", "fingerprints")},
        "baseline": baseline and {"backend": baseline.backend, "dtype": baseline.dtype, "versions": baseline.versions},
        "on_gpu": bool(baseline and baseline.platform.get("gpu")),
        "items": len(items),
        "groups": len({item.group for item in items if item.group is not None}),
        "calibration": {
            "asked": counts["calib_asked"],
            "used": counts["calib_used"],
            "default": Calib().samples,
        },
        "evaluation": {"asked": counts["eval_asked"], "used": counts["eval_used"]},
    }


def _arm(arm: Arm, records: list[Record], measured: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": arm.name,
        "role": arm.role,
        "recipe": arm.recipe,
        "backend": arm.backend,
        "dtype": arm.dtype,
        "engine_digest": arm.engine_digest,
        "versions": arm.versions,
        "platform": arm.platform,
        "sampling": arm.sampling,
        "answers": len(records),
        "truncated": sum(record.finish_reason == "length" for record in records),
        **measured,
    }


def _sizes(root: Path, arms: dict[str, Arm]) -> list[dict[str, Any]]:
    """Bytes on disk of the checkpoint and of each engine."""
    places = {"checkpoint": root / "artifacts/checkpoint"}
    places |= {name: root / "engines" / name for name in arms if name not in ("baseline", "repeat")}
    return [{"name": name, "bytes": folder_size(place)} for name, place in places.items() if place.is_dir()]
