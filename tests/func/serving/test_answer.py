"""The stage ``answer`` with real HTTP: a baseline that already runs, and an engine that the stage starts."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from aiohttp import web

from pipeline.engines.scheduler import Scheduler
from pipeline.engines.server import build_app
from pipeline.errors import DataError, InputError, ServerError, UsageError
from pipeline.records import Item, read_arm, read_records, read_scores, read_timings, write_items
from stages import answer
from tests import tiny
from tests.unit.serving.fake_engine import FakeExecutor, ScoringExecutor, continuation

EOS = 2
POLICY = Path(__file__).parents[3] / "policy.yaml"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project folder as the earlier stages leave it."""
    monkeypatch.chdir(tmp_path)
    Path("calib_data").mkdir()
    items = [Item(f"item-{number}", "s", "r", (number + 3, 4)) for number in range(25)]
    write_items(Path("calib_data/eval.jsonl"), items)
    tiny.tokenizer().save_pretrained("artifacts/checkpoint")
    prints = {"weights": "w", "tokenizer": "t", "template": "p", "generation_config": "g"}
    Path("artifacts/checkpoint.json").write_text(json.dumps({"fingerprints": prints, "eos_token_ids": [EOS]}))
    device = {"gpu": None, "sm": None, "tensorrt": None, "cpu": "x86_64", "memory": 1}
    Path("artifacts/platform.json").write_text(json.dumps({"device": device}))
    shutil.copy(POLICY, tmp_path)
    write_params("http://127.0.0.1:9")
    return tmp_path


def write_params(url: str, max_new_tokens: int = 20, scored: int = 0) -> None:
    Path("params.yaml").write_text(
        f"eval: {{max_new_tokens: {max_new_tokens}, scored: {scored}}}\nengine: {{max_tokens: 64}}\n"
        f"baseline: {{url: '{url}', concurrency: 4}}\nrecipes: [int8_sq]\nseed: 5\n"
    )


@contextmanager
def served(executor: FakeExecutor) -> Iterator[str]:
    loop = asyncio.new_event_loop()

    async def start() -> web.AppRunner:
        runner = web.AppRunner(build_app(Scheduler(executor), tiny.tokenizer(), "toy", frozenset({EOS})))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    runner = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def run(monkeypatch: pytest.MonkeyPatch, arm: str) -> None:
    monkeypatch.setattr(sys, "argv", ["stages.answer", arm])
    answer.main()


@pytest.mark.usefixtures("project")
def test_the_baseline_answers_twice_in_two_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(FakeExecutor()) as url:
        write_params(url)
        run(monkeypatch, "baseline")
    first, second = Path("artifacts/answers/baseline"), Path("artifacts/answers/repeat")
    assert read_records(first) == read_records(second)
    assert len(read_timings(first)) == len(read_records(first)) == 25
    for record in read_records(first):
        tokens, reason = continuation(list(record.prompt_token_ids), 20, frozenset({EOS}))
        assert record.output_token_ids == tuple(tokens[:-1] if reason == "stop" else tokens)
        assert record.finish_reason == reason
    arm, repeat = read_arm(first), read_arm(second)
    assert (arm.role, arm.order_seed, repeat.role, repeat.order_seed) == ("baseline", 5, "repeat", 6)
    assert (arm.backend, arm.dtype, arm.engine_digest) == ("vllm", "float32", None)
    assert arm.sampling == {"temperature": 0, "max_new_tokens": 20, "stop_token_ids": [EOS]}
    assert arm.platform == {"gpu": None, "sm": None, "tensorrt": None, "cpu": "x86_64"}
    assert (arm.tokenizer_fingerprint, arm.template_fingerprint) == ("t", "p")
    assert arm.wall_s > 0
    assert arm.versions["vllm"]


@pytest.mark.usefixtures("project")
def test_both_passes_score_the_same_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """Token ``t`` has log-probability ``-t / 100``; in the tiny vocabulary ``a0`` is 5 and ``b0`` is 45."""
    items = [Item(f"item-{number}", "s", f"b{number} a0", (number + 3, 4)) for number in range(9)]
    write_items(Path("calib_data/eval.jsonl"), items)
    with served(ScoringExecutor()) as url:
        write_params(url, scored=6)
        run(monkeypatch, "baseline")
    scores = read_scores(Path("artifacts/answers/baseline"))
    assert scores == read_scores(Path("artifacts/answers/repeat"))
    assert len({score.id for score in scores}) == 6
    for score in scores:
        assert score.log_probs == pytest.approx((-(45 + int(score.id[-1])) / 100, -0.05))


@pytest.mark.usefixtures("project")
def test_a_failing_engine_leaves_no_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = FakeExecutor()
    executor.fail_at = 5
    with served(executor) as url:
        write_params(url)
        with pytest.raises(ServerError, match="item item-.*the engine failed: RuntimeError: out of memory"):
            run(monkeypatch, "baseline")
    assert not Path("artifacts/answers").exists()


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(("dtype", "gpu"), [("auto", "Some GPU"), ("float16", None)])
def test_a_baseline_whose_weights_float16_makes_infinite_is_refused(
    dtype: str, gpu: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    intake = json.loads(Path("artifacts/checkpoint.json").read_text())
    Path("artifacts/checkpoint.json").write_text(json.dumps(intake | {"fp16_overflow": ["mlp.up_proj.weight", "x"]}))
    Path("artifacts/platform.json").write_text(json.dumps({"device": {"gpu": gpu}}))
    Path("params.yaml").write_text(f"eval: {{max_new_tokens: 8}}\nbaseline: {{dtype: {dtype}}}\nrecipes: [int8_sq]\n")
    with pytest.raises(InputError, match=r"2 tensors .* first mlp\.up_proj\.weight") as error:
        run(monkeypatch, "baseline")
    assert "bfloat16" in error.value.next_step


@pytest.mark.usefixtures("project")
def test_an_item_that_does_not_fit_is_refused_before_the_server_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    write_params("http://127.0.0.1:9", max_new_tokens=63)
    with pytest.raises(DataError, match="item item-0: 2 prompt tokens and 63 new ones exceed the limit 64"):
        run(monkeypatch, "baseline")


@pytest.mark.usefixtures("project")
def test_an_arm_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="usage"):
        run(monkeypatch, "int8_mixed")
