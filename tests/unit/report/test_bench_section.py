"""The section about load: its numbers are those of the runs, and it says so where there are none."""

from __future__ import annotations

import copy
import csv
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from pipeline.files import read_json, write_json
from pipeline.report.bench import bench_data, number
from pipeline.report.bench_plots import curves, seconds, timeline
from pipeline.report.collect import collect
from pipeline.report.render import page, summary, write_report
from pipeline.report.svg import ticks
from pipeline.report.text import number as shown
from tests.unit.report.conftest import PARAMS
from tests.unit.report.test_render import EVIL, parsed


@pytest.fixture(scope="module")
def data(run: Path) -> dict[str, Any]:
    return collect(run, PARAMS)


def section(data: dict[str, Any]) -> str:
    html = page(data)
    return html[html.index('<section id="load">') : html.index('<section id="cost">')]


def words(data: dict[str, Any]) -> str:
    return " ".join(parsed(section(data)).words.split())


def runs(root: Path, arm: str, point: str) -> list[dict[str, Any]]:
    return [one for one in read_json(root / f"artifacts/bench/{arm}/bench.json")["runs"] if one["point"] == point]


def test_every_load_and_arm_has_its_row(run: Path, data: dict[str, Any]) -> None:
    rows = {(row["point"], row["arm"]): row for row in data["bench"]["latency"]}
    arms = ("baseline", "int8_mixed", "int8_sq")
    points = ("sweep 1", "sweep 4", "sweep 16", "poisson 6/s", "spike 4 to 40/s")
    assert list(rows) == [(point, arm) for point in points for arm in arms]
    for (point, arm), row in rows.items():
        found = runs(run, arm, point)
        assert row["requests"] == sum(one["requests"] for one in found)
        medians = [one["latency"]["tpot_ms"]["p50"] for one in found]
        assert row["tpot_ms"]["p50"]["value"] == pytest.approx(statistics.fmean(medians))
        half = row["tpot_ms"]["p50"]["upper"] - row["tpot_ms"]["p50"]["value"]
        assert half == pytest.approx(stats.t.ppf(0.975, 2) * stats.sem(medians))
        assert shown(row["tpot_ms"]["p50"]["value"], 1) in words(data)
    assert rows["sweep 1", "baseline"]["ttft_ms"]["p99"]["value"] is None
    assert "not enough" in words(data)


def test_few_repeats_have_no_interval_and_the_page_says_so(run: Path, data: dict[str, Any], own_run: Path) -> None:
    assert "± is a 95 % interval over the repeats" in words(data)
    for arm in ("baseline", "int8_mixed", "int8_sq"):
        path = own_run / f"artifacts/bench/{arm}/bench.json"
        bench = read_json(path)
        bench["runs"] = [one for one in bench["runs"] if one["repeat"] == 0]
        bench["settings"]["repeats"] = 1
        write_json(path, bench)
    alone = collect(own_run, PARAMS)
    assert "With fewer than three repeats there is no interval" in words(alone)
    assert "±" not in words(alone)
    assert number([1.0, 2.0]) == {"value": 1.5, "lower": None, "upper": None, "repeats": 2}
    assert number([1.0, None, 2.0])["value"] is None
    del run


def test_levels_of_both_arms(data: dict[str, Any]) -> None:
    levels = {row["level"]: row for row in data["bench"]["levels"]}
    assert list(levels) == [
        *("speed-first", "infer-scale", "reliability-first", "cost-efficiency", "performance-first"),
    ]
    assert set(levels["speed-first"]["arms"]) == {"baseline", "int8_mixed", "int8_sq"}
    assert levels["infer-scale"]["arms"]["baseline"]["outcome"] == "not enough"
    assert levels["reliability-first"]["arms"]["baseline"]["outcome"] == "not met"
    assert levels["performance-first"]["arms"]["int8_sq"]["outcome"] == "met"
    text = words(data)
    for phrase in ("TPOT p90 below 5 ms", "E2E p99.9 below 2000 ms", "not enough requests", "not met", "met"):
        assert phrase in text


def test_the_fleet_is_a_table_a_plot_and_a_file(data: dict[str, Any], tmp_path: Path) -> None:
    fleet = data["bench"]["fleet"]
    assert len(fleet["rows"]) == 3 * 2 * 16
    assert "<polyline" in section(data)
    write_report(data, tmp_path)
    with (tmp_path / "fleet.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 96
    assert {key: rows[0][key] for key in ("arm", "strategy", "nodes")} == {
        **{"arm": "baseline", "strategy": "replicated", "nodes": "1"}
    }
    assert float(rows[0]["capacity"]) == pytest.approx(fleet["rows"][0]["capacity"])


def test_recommendation_spike_and_servers_are_told(data: dict[str, Any]) -> None:
    text = words(data)
    for one in data["bench"]["recommendations"]:
        assert one["headline"] in text
        assert all(reason["text"] in text for reason in one["reasons"])
    assert "timeout" in text
    assert "recovers after" in text.lower()
    assert "9 s" in text  # a server's start
    assert "spike 4 to 40/s" in summary(data)


def test_gpus_are_told_where_there_are_some(own_run: Path) -> None:
    path = own_run / "artifacts/bench/baseline/bench.json"
    bench = read_json(path)
    known = {"count": 1, "utilisation": 81.0, "memory": 40_000_000_000, "power_w": 512.0, "energy_j": 9.0}
    for one in bench["runs"]:
        one["gpu"] = known | {"energy_per_token_j": 0.125}
    write_json(path, bench)
    text = words(collect(own_run, PARAMS))
    for told in ("81 %", "40.0 GB", "512 W", "0.125 J"):
        assert told in text
    for one in bench["runs"]:
        one["gpu"] = dict.fromkeys([*known, "energy_per_token_j"])
    write_json(path, bench)
    assert "512 W" not in words(collect(own_run, PARAMS))


def test_an_invalid_run_is_marked_not_shown_as_slow(own_run: Path) -> None:
    path = own_run / "artifacts/bench/baseline/bench.json"
    bench = read_json(path)
    for one in bench["runs"]:
        if one["point"] == "sweep 16":
            one["client"] |= {"valid": False, "why": "requests were sent late"}
    write_json(path, bench)
    found = collect(own_run, PARAMS)
    assert "baseline: this run is INVALID. sweep 16: requests were sent late" in words(found)
    assert section(found).count('<tr class="void">') == 1
    assert "sweep 16 **INVALID**" in summary(found)
    assert {one["choice"] for one in found["bench"]["recommendations"]} == {"undecided"}
    assert {row["arm"] for row in found["bench"]["fleet"]["needed"]} == {"int8_mixed", "int8_sq"}


def test_without_a_bench_the_page_says_so(own_run: Path, data: dict[str, Any]) -> None:
    write_json(own_run / "artifacts/bench/bench.json", {"schema": 1, "arms": [], "order": []})
    found = collect(own_run, PARAMS)
    assert found["bench"] is None
    assert "No load was measured" in words(found)
    assert "| load |" not in summary(found)
    assert "| load |" in summary(data)
    assert bench_data(own_run / "elsewhere", {}) is None


def test_what_a_server_says_is_escaped(data: dict[str, Any]) -> None:
    found = copy.deepcopy(data)
    bench = found["bench"]
    bench["latency"][0]["point"] = bench["latency"][0]["arm"] = bench["spikes"][0]["arm"] = EVIL
    bench["spikes"][0]["failures"] = {EVIL: 3}
    bench["arms"][0]["invalid"] = bench["recommendations"][0]["would_change"] = [EVIL]
    bench["sweep"] = {EVIL: bench["sweep"]["baseline"]}
    bench["levels"][0]["arms"]["baseline"]["detail"] = EVIL
    html = page(found)
    assert "script" not in parsed(html).seen
    assert html.count("alert") >= 8
    rows = [line for line in summary(found).splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in rows} == {6, 9, 11}


def test_bars_stack_to_what_was_asked() -> None:
    """Ten asked: five good, three slow, two failed; 100 units of height for ten requests."""
    plot = seconds([{"asked": 10, "good": 5, "failed": 2}], 10, "arm", (0.0, 1.0))
    heights = {style: float(height) for style, height in re.findall(r'class="(\w+)"[^>]*height="([\d.]+)"', plot)}
    whole = heights["good"] + heights["slow"] + heights["failed"]
    assert heights["good"] == pytest.approx(whole / 2, abs=0.1)
    assert heights["slow"] == pytest.approx(whole * 0.3, abs=0.1)
    assert "5 good, 3 slow, 2 failed" in plot
    assert 'class="zone-spike"' in plot


def test_curves_and_timelines_hold_every_point() -> None:
    plot = curves({"a": [(1, 10.0), (4, 20.0)], "b": [(1, 5.0)]}, "t", "x", evenly=True)
    assert plot.count("<circle") == 3
    assert "a: 20 at 4" in plot
    assert curves({}, "empty", "x").count("<circle") == 0
    row = {"item": EVIL, "due_s": 1.0, "sent_s": 1.1, "end_s": 2.0, "tokens_s": [1.5, 1.5, 1.9]}
    drawn = timeline([row], "t")
    assert drawn.count('class="arrival"') == 2  # two tokens came together
    assert "<script" not in drawn


@pytest.mark.parametrize(("most", "marks"), [(10, [0, 2.5, 5, 7.5, 10]), (0.7, [0, 0.2, 0.4, 0.6, 0.8]), (0, [0, 1])])
def test_ticks_are_round(most: float, marks: list[float]) -> None:
    assert ticks(most) == pytest.approx(marks)
