"""The real ``vllm serve`` on an INT8 engine: it computes with the calibrated scales, and answers as the model does."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.engines import BuildInputs
from pipeline.engines.manifest import verify_files, write_manifest
from pipeline.engines.vllm import compile_engine
from pipeline.params import Baseline, Engine, Params
from pipeline.platform import describe_platform
from pipeline.records import Item
from pipeline.serving.arms import engine_commands
from pipeline.serving.client import ask
from pipeline.serving.info import served_model
from pipeline.serving.process import Server
from pipeline.serving.replicas import replicated
from pipeline.serving.scoring import Forced, score
from tests import tiny
from tests.emulation import emulate
from tests.unit.engines.vllm.models import SMOOTH, VOCABULARY, quantized

VLLM = Path(__file__).parents[3] / ".venv-vllm/bin/vllm"
RECIPE = replace(SMOOTH, exclude=("*mlp.down_proj",), backends=("vllm",))

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not VLLM.exists(), reason="no .venv-vllm: make setup-vllm"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``engines/int8`` of a model with grouped-query attention, beside its original checkpoint."""
    root = tmp_path_factory.mktemp("vllm")
    found = quantized(root, RECIPE, hidden_size=128, num_key_value_heads=2, head_dim=32)
    (root / "quantized").mkdir()
    found.export.rename(root / "quantized/checkpoint")
    engine = Engine(backend="vllm", max_batch=8, max_tokens=64)
    baseline = Baseline(vllm=str(VLLM), env={"VLLM_CPU_KVCACHE_SPACE": "1"})
    given = BuildInputs(root / "checkpoint", root, root / "quantized", RECIPE, engine, describe_platform(baseline))
    target = root / "engines/int8"
    target.mkdir(parents=True)
    build = compile_engine(given, target)
    tiny.tokenizer().save_pretrained(target / "tokenizer")
    limits = {"max_batch": 8, "max_tokens": 64}
    description = {"name": "int8", "recipe": "int8", "backend": "vllm", "dtype": build.pop("dtype"), "limits": limits}
    write_manifest(target, description | {"sources": {}, "platform": given.platform["device"], "build": build})
    return root


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    params = Params(
        engine=Engine(backend="vllm", max_batch=8, max_tokens=64),
        baseline=Baseline(vllm=str(VLLM), env={"VLLM_CPU_KVCACHE_SPACE": "1"}),
        eval=replace(Params().eval, max_new_tokens=16),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        commands = engine_commands("int8", params, gpu=False)
    with replicated(commands, folder / "logs", timeout_s=300) as running:
        yield running


def rows() -> list[list[int]]:
    draw = random.Random(3)
    return [[draw.randrange(3, VOCABULARY) for _ in range(length)] for length in (12, 30, 7, 21, 16, 40)]


def log_probs(model: Any, ids: list[int]) -> list[float]:
    import torch

    with torch.inference_mode():
        found = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), dim=-1)
    return [float(found[place, token]) for place, token in enumerate(ids[1:])]


def test_log_probabilities_are_the_calibrated_models(folder: Path, server: Server) -> None:
    """Against the emulation of what it serves; the original model is more than ten times farther away."""
    from transformers import AutoModelForCausalLM

    forced = [Forced(f"row {place}", tuple(ids[:1]), tuple(ids[1:])) for place, ids in enumerate(rows())]
    found = [one.log_probs for one in score(forced, server.urls, served_model(server), concurrency=4, order_seed=1)]
    emulated = emulate(folder / "engines/int8/checkpoint")
    original = AutoModelForCausalLM.from_pretrained(folder / "checkpoint").eval()

    def distance(model: Any) -> float:
        pairs = [zip(given, log_probs(model, ids), strict=True) for given, ids in zip(found, rows(), strict=True)]
        differences = [abs(one - other) for pair in pairs for one, other in pair]
        return sum(differences) / len(differences)

    assert distance(emulated) < distance(original) / 10


def test_greedy_answers_are_the_calibrated_models(folder: Path, server: Server) -> None:
    import torch

    items = [Item(f"row {place}", "", "", tuple(ids)) for place, ids in enumerate(rows())]
    words = tiny.tokenizer()
    records, _ = ask(
        items,
        server.urls,
        "int8",
        tokenizer=words,
        max_new_tokens=8,
        max_tokens=64,
        stop_token_ids=[2],
        concurrency=6,
        order_seed=1,
    )
    emulated, same = emulate(folder / "engines/int8/checkpoint"), 0
    for record, ids in zip(records, rows(), strict=True):
        with torch.inference_mode():
            expected = int(emulated(torch.tensor([ids])).logits[0, -1].argmax())
        same += record.output_token_ids[:1] == (expected,)
    assert same >= len(items) - 1  # one may lie on an edge


def test_the_folder_holds_all_that_is_served(folder: Path) -> None:
    manifest = verify_files(folder / "engines/int8")
    assert manifest["dtype"] == "int8 (rest float32)"
    assert {"checkpoint/config.json", "checkpoint/model.safetensors", "tokenizer/tokenizer.json"} <= set(
        manifest["files"]
    )
