"""One arm answers the evaluation set over HTTP: ``python -m stages.answer ARM``

ARM is ``baseline`` (vLLM, asked twice in two item orders: arms ``baseline`` and ``repeat``), ``runtime`` (the engine
without quantisation) or a recipe. Reads the checkpoint or the engine and ``calib_data/eval.jsonl``; writes
``artifacts/answers/ARM``. After its answers an arm scores ``eval.scored`` reference answers, the same for all arms.
The server's log stays in ``logs/ARM.log``.
"""

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.engines.manifest import read_manifest
from pipeline.errors import InputError, UsageError
from pipeline.files import read_json
from pipeline.gate.policy import load_policy
from pipeline.params import Params, load_params
from pipeline.records import Arm, Item, read_items, write_answers
from pipeline.serving.arms import CHECKPOINT, ENGINES, serving
from pipeline.serving.client import ask, refuse_too_long
from pipeline.serving.info import served_model, server_version
from pipeline.serving.process import Server
from pipeline.serving.scoring import chosen, score
from pipeline.serving.vllm import vllm_dtype
from stages._main import stage

ITEMS = Path("calib_data/eval.jsonl")
ANSWERS = Path("artifacts/answers")


def main() -> None:
    params = load_params()
    if len(sys.argv) != 2 or sys.argv[1] not in ("baseline", "runtime", *params.recipes):
        raise UsageError("usage: python -m stages.answer ARM", "ARM is baseline, runtime or a recipe of params.yaml")
    name = sys.argv[1]
    if name == "baseline":
        answer_baseline(params)
    else:
        answer_engine(name, params)


def answer_baseline(params: Params) -> None:
    """The baseline and its repeat: the same server, the same items, another order."""
    limit = params.engine.max_tokens
    items = _items(params, limit)
    device = _device()
    gpu = device.get("gpu") is not None
    dtype = vllm_dtype(params.baseline, gpu)
    if params.baseline.url is None:
        _refuse_overflow(dtype)
    arm = _arm("baseline", params, device, backend="vllm", dtype=dtype)
    with serving("baseline", params, gpu) as server:
        arm = replace(arm, versions={"vllm": server_version(server)})
        repeat = replace(arm, name="repeat", role="repeat", order_seed=arm.order_seed + 1)
        for one in (arm, repeat):
            _ask(server, one, items, params, max_tokens=limit, concurrency=params.baseline.concurrency)


def _refuse_overflow(dtype: str) -> None:
    """A baseline with infinite weights would be beaten by any engine."""
    overflow = read_json(Path("artifacts/checkpoint.json"))["fp16_overflow"]
    if dtype == "float16" and overflow:
        raise InputError(
            f"baseline.dtype: {len(overflow)} tensors of the checkpoint hold values that float16 makes infinite, "
            f"first {overflow[0]}",
            "set baseline.dtype: bfloat16 in params.yaml",
        )


def answer_engine(name: str, params: Params) -> None:
    """One engine, behind ``enginegate serve``."""
    manifest = read_manifest(ENGINES / name)
    limits = manifest["limits"]
    items = _items(params, limits["max_tokens"])
    device = _device()
    arm = replace(
        _arm(name, params, device, backend=manifest["backend"], dtype=manifest["dtype"]),
        role="runtime" if name == "runtime" else "candidate",
        recipe=manifest["recipe"],
        engine_digest=manifest["digest"],
        versions=manifest["build"]["versions"],
        # A candidate is asked under a policy that stands: the gate refuses answers from before a change of it.
        extra={} if name == "runtime" else {"policy_digest": load_policy().digest()},
    )
    with serving(name, params, device.get("gpu") is not None) as server:
        # Twice the batch: while one batch runs, the next one waits complete.
        _ask(server, arm, items, params, max_tokens=limits["max_tokens"], concurrency=2 * limits["max_batch"])


def _items(params: Params, max_tokens: int) -> list[Item]:
    """The evaluation set, refused before a server is started when an item does not fit."""
    items = read_items(ITEMS)
    refuse_too_long(items, params.eval.max_new_tokens, max_tokens)
    return items


def _device() -> dict[str, Any]:
    device: dict[str, Any] = read_json(Path("artifacts/platform.json"))["device"]
    return device


def _arm(name: str, params: Params, device: dict[str, Any], backend: str, dtype: str) -> Arm:
    intake = read_json(Path("artifacts/checkpoint.json"))
    return Arm(
        name=name,
        role=name,
        backend=backend,
        dtype=dtype,
        engine_digest=None,
        tokenizer_fingerprint=intake["fingerprints"]["tokenizer"],
        template_fingerprint=intake["fingerprints"]["template"],
        sampling={
            "temperature": 0,
            "max_new_tokens": params.eval.max_new_tokens,
            "stop_token_ids": sorted(intake["eos_token_ids"]),
        },
        versions={},
        platform={key: device.get(key) for key in ("gpu", "sm", "tensorrt", "cpu")},
        order_seed=params.seed,
    )


def _ask(server: Server, arm: Arm, items: list[Item], params: Params, *, max_tokens: int, concurrency: int) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    model = served_model(server)
    begin = time.perf_counter()
    records, timings = ask(
        items,
        server.urls,
        model,
        tokenizer=tokenizer,
        max_new_tokens=arm.sampling["max_new_tokens"],
        max_tokens=max_tokens,
        stop_token_ids=arm.sampling["stop_token_ids"],
        concurrency=concurrency,
        order_seed=arm.order_seed,
        label=arm.name,
        dialect=server.dialect,
    )
    wall_s = time.perf_counter() - begin
    arm = replace(arm, wall_s=wall_s, extra=arm.extra | {"concurrency": concurrency})
    forced = chosen(items, params.eval.scored, tokenizer, max_tokens)
    scores = score(
        forced,
        server.urls,
        model,
        concurrency=concurrency,
        order_seed=arm.order_seed,
        label=f"{arm.name} (scoring)",
    )
    write_answers(ANSWERS / arm.name, arm, records, timings, scores)
    tokens = sum(timing.output_tokens for timing in timings)
    print(f"{arm.name}: {len(records)} answers, {tokens} tokens in {wall_s:.0f} s ({tokens / wall_s:.0f} tokens/s)")


if __name__ == "__main__":
    stage(main)
