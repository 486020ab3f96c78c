"""Serving against the stand-in: token ids in and out, greedy, its own stop ids off, and no engine of elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import IntegrityError, ServerError
from pipeline.quantize.probe import Probe, _last_logits, agreement
from pipeline.records import Item
from pipeline.serving.client import ask
from pipeline.serving.dialects import Dialect
from pipeline.serving.info import served_model, server_version
from pipeline.serving.process import Server
from tests.func.tensorrt_llm.conftest import Project
from tests.standins.trtllm import FAULT
from tests.standins.trtllm.model import load_model
from tests.tiny import PROMPT, rows, tokenizer

Make = Callable[..., Project]
WORDS = tokenizer()
EOS = 2


def items(count: int = 12) -> list[Item]:
    """Prompts of several lengths."""
    prompts = [WORDS(PROMPT.replace("{source}", row["source"]))["input_ids"] for row in rows(count, seed=5)]
    return [Item(f"item-{place}", "", "", tuple(prompt)) for place, prompt in enumerate(prompts)]


def answers(
    server: Server,
    asked: list[Item],
    stops: tuple[int, ...] = (EOS,),
    dialect: Dialect | None = None,
    max_tokens: int = 64,
) -> Any:
    records, _ = ask(
        asked,
        server.url,
        served_model(server),
        tokenizer=WORDS,
        max_new_tokens=16,
        max_tokens=max_tokens,
        stop_token_ids=stops,
        concurrency=4,
        order_seed=1,
        dialect=dialect or server.dialect,
    )
    return {record.id: record for record in records}


def torch_answers(model: Any, asked: list[Item], stop: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """Greedy, by transformers."""
    import torch

    found = {}
    for item in asked:
        ids = torch.tensor([item.prompt_token_ids])
        out = model.generate(ids, max_new_tokens=16, do_sample=False, eos_token_id=stop, pad_token_id=EOS)
        new = tuple(out[0, ids.shape[1] :].tolist())
        found[item.id] = (new[:-1], "stop") if new[-1] == stop else (new, "length")
    return found


def test_an_engine_is_asked_by_token_ids(project: Make, exports: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One server for all that a request can show."""
    import torch
    from transformers import AutoModelForCausalLM

    made, asked = project(), items()
    made.build()
    model = AutoModelForCausalLM.from_pretrained(exports.checkpoint, dtype=torch.float32)
    model.load_state_dict({name: value.half().float() for name, value in model.state_dict().items()})
    # The model knows no end; what it says third to the first prompt stands for one.
    stop = torch_answers(model, asked[:1], EOS)[asked[0].id][0][2]
    monkeypatch.setenv(FAULT, "serve-reuse")  # wrong answers to a repeated prompt, were it not for block reuse off
    with made.serving() as server:
        assert server_version(server) == "1.2.1"
        first, second = (answers(server, asked, (stop,)) for _ in range(2))
        # Issues 2120, 5670: only the ids of the request end an answer.
        wanted = torch_answers(model, asked, stop)
        assert {key: (record.output_token_ids, record.finish_reason) for key, record in first.items()} == wanted
        assert "stop" in {reason for _, reason in wanted.values()}
        # Issue 2699: the same prompt again.
        assert second == first
        # It forbids fields that it does not know, so vLLM's words will not do.
        with pytest.raises(ServerError, match=r"Extra inputs are not permitted: \['return_token_ids'\]"):
            answers(server, asked, (stop,), dialect="vllm")
        long = [replace(asked[0], prompt_token_ids=asked[0].prompt_token_ids * 8)]
        with pytest.raises(ServerError, match="HTTP 400 .*longer than max_seq_len"):
            answers(server, long, (stop,), max_tokens=1000)
    assert "'enable_block_reuse': False" in Path("logs/runtime.log").read_text()


def logits_of(folder: Path, probe: Probe) -> Any:
    """Read by code of the stand-in's own, from what was written and nothing else."""
    return _last_logits(load_model(folder), probe.tokens)


@pytest.mark.parametrize(
    ("recipe", "profile", "build", "part"),
    [
        ("int8_mixed", "engine", "trtllm-build", "engine"),
        ("fp8", "engine", "llm-api", "engine"),
        ("fp8", "pytorch", "trtllm-build", "checkpoint"),
    ],
)
def test_what_is_served_is_the_calibrated_model(
    recipe: str, profile: str, build: str, part: str, project: Make
) -> None:
    """Each road of an export, against ModelOpt's own quantised model. Gate and up exchanged would give 5e-5."""
    made = project(profile=profile).changed(build=build)
    made.build(recipe)
    probe = made.exports.probes[recipe]
    assert agreement(probe.logits, logits_of(Path("engines") / recipe / part, probe)).mean_kl < 5e-6


def test_an_fp8_engine_is_as_near_to_the_original_as_the_calibrated_model(project: Make, exports: Any) -> None:
    """q, k and v get one scale there, so many of their weights are rounded anew: another FP8 model, as good."""
    import torch
    from transformers import AutoModelForCausalLM

    made, probe = project(), exports.probes["fp8"]
    made.build("fp8")
    original = AutoModelForCausalLM.from_pretrained(exports.checkpoint, dtype=torch.float32).eval()
    logits = _last_logits(original, probe.tokens)
    engine, calibrated = (
        agreement(logits, other) for other in (logits_of(Path("engines/fp8/engine"), probe), probe.logits)
    )
    assert engine.mean_kl < 1.25 * calibrated.mean_kl
    assert engine.top1 == 1.0


ELSEWHERE: list[tuple[dict[str, Any], str]] = [
    ({"sm": "8.9"}, "built for SM 90, here is SM 89"),
    ({"versions": {"tensorrt": "10.13.3"}}, "built for TensorRT 10.14.1.48, here is TensorRT 10.13.3"),
    ({"versions": {"tensorrt_llm": "1.1.0"}}, "built for TensorRT-LLM 1.2.1, here is TensorRT-LLM 1.1.0"),
    ({"gpus": 0}, "no GPU to serve it on"),
]


def test_an_engine_of_elsewhere_is_refused_before_it_is_loaded(project: Make) -> None:
    """Issues 3031, 1838, 1038: the library's own message comes later and names no way out."""
    project().build()
    for other, message in ELSEWHERE:
        made = project(**other)
        with pytest.raises(IntegrityError, match=message), made.serving():
            pass
    assert not Path("logs/runtime.log").exists(), "no server was started"


def test_a_checkpoint_is_bound_to_no_gpu(project: Make) -> None:
    """The later line's artifact, served on another GPU than it was made on, without `--backend trt`."""
    project(profile="pytorch").build("fp8")
    with project(profile="pytorch", sm="10.0").serving("fp8") as server:
        got = answers(server, items(3))
    assert {record.finish_reason for record in got.values()} == {"length"}


def test_a_server_that_dies_shows_its_log(project: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made = project()
    made.build()
    monkeypatch.setenv(FAULT, "serve-dies")
    with pytest.raises(ServerError, match="Failed to initialize executor on rank 0"), made.serving():
        pass
