"""The stage ``bench`` and the commands around it, with real HTTP and client processes against scripted servers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pipeline import cli
from pipeline.bench.fleet import load_prices
from pipeline.bench.records import read_bench
from pipeline.engines.manifest import read_manifest, write_manifest
from pipeline.errors import ServerError
from pipeline.files import read_json, read_jsonl
from pipeline.gate.levels import judge_levels
from pipeline.gate.policy import load_policy
from pipeline.records import Item, write_items
from pipeline.serving.process import Server
from stages import bench as stage
from tests.unit.serving.mock_server import DONE, Refuse, Script, chunk, scripted, usage

TOKENS = 4
PARAMS = """
eval: {max_new_tokens: 8}
engine: {max_tokens: 64}
recipes: [fast, slow]
bench:
  kinds: KINDS
  engines: [fast]
  repeats: REPEATS
  new_tokens: 4
  warmup: 3
  timeout_s: 60
  max_lag_ms: LAG
  sweep: {concurrency: [2], seconds: 0.4}
  spike: {base: 10, peak: 60, before_s: 0.2, peak_s: 0.3, after_s: 0.2}
"""
POLICY = """
service:
  good: {ttft_ms: 60000, tpot_ms: 60000}
  levels: {reliability-first: {importance: critical}}
"""


def answer(body: dict[str, Any], pause_s: float) -> Script:
    ids = [5] * TOKENS
    return [pause_s, chunk(ids[:1]), pause_s, chunk(ids[1:], "", "length"), usage(len(body["prompt"]), TOKENS), DONE]


def write_params(kinds: str = "[sweep, spike]", repeats: int = 1, lag_ms: float = 10_000) -> None:
    text = PARAMS.replace("KINDS", kinds).replace("REPEATS", str(repeats)).replace("LAG", str(lag_ms))
    Path("params.yaml").write_text(text)


class Farm:
    """Starts a scripted server whenever the stage asks for an arm, and remembers it."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.asked: list[int] = []
        self.scripts = {"baseline": lambda body: answer(body, 0.02), "fast": lambda body: answer(body, 0.005)}

    @contextmanager
    def serving(self, name: str, _params: Any, gpu: bool) -> Iterator[Server]:
        assert not gpu
        self.started.append(name)
        with scripted(self.scripts[name]) as (url, seen):
            yield Server(name, url, None, None, 1.5)
            self.asked.append(len(seen))


@pytest.fixture
def farm(monkeypatch: pytest.MonkeyPatch) -> Farm:
    made = Farm()
    monkeypatch.setattr(stage, "serving", made.serving)
    monkeypatch.setattr(sys, "argv", ["stages.bench"])
    return made


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    items = [Item(f"item-{place}", "s", "r", tuple(range(3, 9 + place % 3))) for place in range(12)]
    write_items(Path("calib_data/eval.jsonl"), items)
    Path("artifacts").mkdir()
    Path("artifacts/platform.json").write_text(json.dumps({"device": {"gpu": None, "cpu": "x86_64"}}))
    Path("engines/fast").mkdir(parents=True)
    Path("engines/fast/model.onnx").write_bytes(b"engine")
    about = {"name": "fast", "recipe": "fast", "backend": "onnxruntime", "dtype": "int8", "limits": {"max_tokens": 64}}
    write_manifest(Path("engines/fast"), about | {"sources": {}, "platform": {}, "build": {}})
    write_params()
    Path("policy.yaml").write_text(POLICY)
    Path("prices.yaml").write_text("prices: {hourly: {cpu: 0.1}}\n")
    return tmp_path


@pytest.mark.usefixtures("project")
def test_both_arms_in_alternating_order_on_fresh_servers(farm: Farm) -> None:
    write_params(repeats=2)
    stage.main()
    assert farm.started == ["baseline", "fast", "fast", "baseline"]
    assert read_json(Path("artifacts/bench/bench.json")) == {
        **{"schema": 1, "arms": ["baseline", "fast"], "order": ["baseline", "fast", "fast", "baseline"]}
    }
    engine = read_manifest(Path("engines/fast"))["digest"]
    for name, digest, pause_ms in (("baseline", None, 20), ("fast", engine, 5)):
        bench = read_bench(Path(), name)
        assert bench is not None
        assert (bench["arm"], bench["engine_digest"], bench["devices"]) == (name, digest, 1)
        assert [(run["load"], run["repeat"]) for run in bench["runs"]] == [
            *(("sweep", 0), ("spike", 0), ("sweep", 1), ("spike", 1)),
        ]
        for run in bench["runs"]:
            assert run["failed"] == 0
            seen = run["server"]
            assert (seen["start_s"], seen["devices"], seen["died"]) == (1.5, 1, False)
            assert [seen[key] for key in ("cpu_cores", "cpu_growth", "rss")] == [None] * 3
            assert run["client"]["valid"]
            assert run["metrics"] is None
        spikes = [run for run in bench["runs"] if run["load"] == "spike"]
        assert [run["requests"] for run in spikes] == [2 + 18 + 2] * 2
        assert all(run["latency"]["ttft_ms"]["mean"] >= pause_ms for run in spikes)
        rows = read_jsonl(Path("artifacts/bench") / name / "requests.jsonl")
        counted = [row for row in rows if bench["runs"][row["run"]]["load"] == "spike"]
        assert len(counted) == 44
        assert all(row["first_s"] > row["sent_s"] >= row["due_s"] for row in counted)
        assert all(row["output_tokens"] == TOKENS and row["failure"] is None for row in rows)
        samples = read_jsonl(Path("artifacts/bench") / name / "telemetry.jsonl")
        assert {row["run"] for row in samples} == {0, 1, 2, 3}
    # Warm-ups were asked and are nowhere in the records.
    assert sum(farm.asked) == 4 * 2 * 3 + sum(
        len(read_jsonl(Path("artifacts/bench") / name / "requests.jsonl")) for name in ("baseline", "fast")
    )
    (level,) = judge_levels(load_policy().service, read_bench(Path(), "fast"), load_prices().prices, 0.95, engine)
    assert (level.outcome, level.detail) == ("not enough", "not enough requests: 18 of the 200 that p95 needs")


@pytest.mark.usefixtures("project")
def test_without_kinds_no_server_is_started(farm: Farm, capsys: pytest.CaptureFixture[str]) -> None:
    write_params("[]")
    stage.main()
    assert farm.started == []
    assert read_json(Path("artifacts/bench/bench.json"))["arms"] == []
    assert read_bench(Path(), "baseline") is None
    assert "no load: bench.kinds" in capsys.readouterr().out


@pytest.mark.usefixtures("project")
def test_failures_under_load_are_results_and_a_broken_server_is_an_error(farm: Farm) -> None:
    calls: list[int] = []

    def flaky(body: dict[str, Any]) -> Script:
        calls.append(1)
        return [Refuse(503)] if len(calls) % 4 == 0 else answer(body, 0.001)

    farm.scripts["fast"] = flaky
    stage.main()
    bench = read_bench(Path(), "fast")
    assert bench is not None
    assert bench["runs"][1]["failures"].keys() == {"HTTP 503"}
    assert 15 < bench["runs"][1]["error_rate"] < 35
    assert bench["runs"][1]["failure_details"]["HTTP 503"][0].startswith("item item-")
    before = read_json(Path("artifacts/bench/bench.json"))
    farm.scripts["fast"] = lambda _body: [Refuse(500)]
    with pytest.raises(ServerError, match="every request of the warm-up failed: item item-.*HTTP 500"):
        stage.main()
    assert read_json(Path("artifacts/bench/bench.json")) == before  # what was there stays whole


@pytest.mark.usefixtures("project")
def test_a_server_that_dies_is_started_again(farm: Farm, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline.bench import run as running

    states = iter([False] + [True] * 20)
    monkeypatch.setattr(running, "healthy", lambda _server: next(states))
    stage.main()
    assert farm.started == ["baseline", "baseline", "fast"]
    bench = read_bench(Path(), "baseline")
    assert bench is not None
    assert [run["server"]["died"] for run in bench["runs"]] == [True, False]


@pytest.mark.usefixtures("project", "farm")
def test_diagnose_writes_a_page_an_arm(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["diagnose"]) == 64  # nothing was benched yet
    assert "not benched" in capsys.readouterr().err
    stage.main()
    capsys.readouterr()
    assert cli.main(["diagnose"]) == 0
    printed = capsys.readouterr().out
    for name in ("baseline", "fast"):
        assert f"page: diagnosis/{name}.html" in printed
        assert "sweep 2" in Path(f"diagnosis/{name}.html").read_text()
    assert cli.main(["diagnose", "fast", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["arm"] == "fast"
    assert cli.main(["diagnose", "other"]) == 64


@pytest.mark.usefixtures("project")
def test_the_command_benches_any_server(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--kind", "constant", "--rate", "40", "--seconds", "0.5", "--new-tokens", "4", "--prompt-tokens", "9"]
    with scripted(lambda body: answer(body, 0.001)) as (url, seen):
        assert cli.main(["bench", url, *words, "--json", "--output", "out"]) == 0
    bench = json.loads(capsys.readouterr().out)
    (run,) = bench["runs"]
    assert (run["point"], run["requests"], run["failed"]) == ("constant 40/s", 20, 0)
    assert all(len(body["prompt"]) == 9 for body in seen)
    assert read_json(Path("out/server/bench.json"))["runs"][0]["requests"] == 20
    with scripted(lambda body: answer(body, 0.001)) as (url, _):
        write_params("[]", lag_ms=0.000001)
        assert cli.main(["bench", url, *words]) == 3  # the client lags by more than a nanosecond
    assert "INVALID" in capsys.readouterr().out
    assert cli.main(["bench", "nothing"]) == 64
    assert cli.main(["bench", "http://127.0.0.1:9", "--kind", "sweep", "--concurrency", "0"]) == 64
