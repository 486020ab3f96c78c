from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pipeline.files import read_json, write_json
from pipeline.records import Timing, read_records
from pipeline.report.collect import collect
from pipeline.report.speed import speed
from tests.unit.report.conftest import PARAMS


def test_numbers_are_those_of_the_run(run: Path) -> None:
    data = collect(run, PARAMS)
    assert data["headline"] == "int8_mixed is promoted, int8_sq is refused."
    assert [recipe["name"] for recipe in data["recipes"]] == ["int8_mixed", "int8_sq"]
    verdict = read_json(run / "artifacts/verdicts/int8_sq.json")
    assert data["recipes"][1]["metrics"] == verdict["metrics"]
    assert data["policy"]["digest"] == verdict["policy_digest"]
    assert data["compared"]["items"] == 400
    assert data["compared"]["groups"] == 100
    assert data["compared"]["calibration"] == {"asked": 256, "used": 250, "default": 10000}
    assert data["compared"]["baseline"]["dtype"] == "float32"
    assert not data["compared"]["on_gpu"]
    assert {row["name"]: row["bytes"] for row in data["sizes"]}["checkpoint"] == 5000
    assert [arm["name"] for arm in data["arms"]] == ["baseline", "repeat", "runtime", "int8_sq", "int8_mixed"]


def test_changed_answers_are_counted_from_the_records(run: Path) -> None:
    texts = {
        name: {record.id: record.text for record in read_records(run / "artifacts/answers" / name)}
        for name in ("baseline", "repeat", "int8_sq")
    }
    data = collect(run, PARAMS)
    for change, name in ((data["recipes"][1]["changes"], "int8_sq"), (data["repeat"], "repeat")):
        assert change["changed"] == sum(texts[name][key] != text for key, text in texts["baseline"].items())
        assert change["worse"] + change["better"] <= change["changed"]
    drops = [row["engine_chrf"] - row["baseline_chrf"] for row in data["recipes"][1]["changes"]["examples"]]
    assert len(drops) == 10
    assert drops == sorted(drops)


def test_it_is_json(run: Path) -> None:
    data = collect(run, PARAMS)
    assert json.loads(json.dumps(data, allow_nan=False))["headline"] == data["headline"]


def test_a_run_without_the_runtime_arm(own_run: Path) -> None:
    shutil.rmtree(own_run / "artifacts/answers/runtime")
    assert "runtime" not in {arm["name"] for arm in collect(own_run, PARAMS)["arms"]}


def test_null_answers_do_not_stop_the_report(own_run: Path) -> None:
    """They make the verdict INVALID, and then the report is wanted most."""
    path = own_run / "artifacts/answers/int8_sq/records.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        line["text"] = None
    path.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    changes = collect(own_run, PARAMS)["recipes"][1]["changes"]
    assert changes["examples"][0]["engine"] == ""


def test_many_recipes_have_a_short_headline(own_run: Path) -> None:
    verdict = read_json(own_run / "artifacts/verdicts/int8_sq.json")
    names = tuple(f"r{place}" for place in range(5))
    for name in names:
        write_json(own_run / f"artifacts/verdicts/{name}.json", verdict | {"recipe": name})
    from dataclasses import replace

    assert collect(own_run, replace(PARAMS, recipes=names))["headline"] == "0 of 5 engines are promoted."


def test_speed() -> None:
    timings = [Timing(str(place), None, float(place + 1), 10) for place in range(5)]
    found = speed(timings, wall_s=10.0)
    assert (found["tokens_per_s"], found["median_s"], found["output_tokens"]) == (5.0, 3.0, 50)
    assert found["p95_s"] == pytest.approx(4.8)
    assert found["median_first_token_s"] is None
    assert speed([], wall_s=0.0)["tokens_per_s"] is None
