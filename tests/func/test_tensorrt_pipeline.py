"""``engine.backend: tensorrt`` from the checkpoint to HTTP answers, with the real stages and ModelOpt.

TensorRT and the GPU are fakes (``tests/unit/engines/tensorrt``): the graph runs in ONNX Runtime, the decoder's buffers
and kernels in NumPy. So this shows that the parts fit together, and nothing about TensorRT or CUDA.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.engines import load_executor
from pipeline.engines.manifest import verify_files
from pipeline.engines.tensorrt import device
from pipeline.engines.tensorrt.plan import read_description
from pipeline.files import digest_file, read_json, write_json
from tests.func.workspace import make_workspace, run_stages
from tests.unit.engines.tensorrt.fake_tensorrt import make_tensorrt
from tests.unit.engines.test_server import post, with_server

PARAMS = """\
recipes: [int8_sq, fp8_kv]
calib: {batch_tokens: 64, max_tokens: 64}
eval: {max_new_tokens: 16}
engine:
  backend: tensorrt
  max_batch: 4
  max_tokens: 64
  tensorrt: {decode_batches: [1]}
"""
HERE = {"gpu": "Fake GPU", "sm": "90", "tensorrt": "10.9.0", "driver": "1", "cuda": "13.0", "cpu": "any"}


@pytest.fixture(scope="module")
def run(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("fake")
    make_workspace(root, tiny_checkpoint, PARAMS)
    write_json(root / "artifacts/platform.json", {"device": HERE})
    trt = make_tensorrt("10.9.0")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(root)
        monkeypatch.setitem(sys.modules, "tensorrt", trt)
        monkeypatch.setattr(device, "Device", lambda: trt.device)
        run_stages(monkeypatch, ("int8_sq", "fp8_kv"))
        yield root


@pytest.mark.parametrize(("name", "kl"), [("runtime", 1e-4), ("int8_sq", 0.01), ("fp8_kv", 0.01)])
def test_an_engine_was_compared_with_its_model(run: Path, name: str, kl: float) -> None:
    manifest = verify_files(run / "engines" / name)
    assert manifest["platform"] == HERE
    assert manifest["backend"] == "tensorrt"
    assert manifest["build"]["probe"]["mean_kl"] < kl
    assert "unchecked" not in manifest["build"]
    assert read_description(run / "engines" / name).sm == ["90"]


def test_the_timing_cache_goes_from_build_to_build(run: Path) -> None:
    found = [
        read_json(run / f"engines/{name}/manifest.json")["build"]["timing_cache"]
        for name in ("runtime", "int8_sq", "fp8_kv")
    ]
    assert [one["before"] for one in found] == [None, found[0]["after"], found[1]["after"]]
    assert found[2]["after"] == digest_file(run / ".cache/tensorrt/timing.cache")


def test_the_cache_of_an_fp8_engine_is_in_fp8(run: Path) -> None:
    kinds = {one.name: one.dtype for one in read_description(run / "engines/fp8_kv").bindings}
    assert {kinds[name] for name in kinds if name.startswith(("past_", "new_")) and "lengths" not in name} == {
        "float8_e4m3fn"
    }


def test_it_is_served_and_bad_requests_leave_it_unharmed(run: Path, tiny_model: Any) -> None:
    import torch

    prompt = [5, 6, 7, 8]
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(12):
            tokens.append(int(tiny_model(torch.tensor([tokens])).logits[0, -1].argmax()))

    async def test(session: Any, url: str) -> Any:
        bad = [
            await post(session, url, prompt=ids, max_tokens=4)
            for ids in ([5, 85], [5, -1], [], [5] * 61, [5, 2**40])  # beyond the vocabulary, empty, too long
        ]
        body = {"prompt": prompt, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
        good = await post(session, url, **body)
        scored = await post(session, url, prompt=prompt, max_tokens=0, echo=True, logprobs=0)
        return bad, good, scored

    bad, (status, good), (_, scored) = with_server(test, load_executor(run / "engines/runtime"))
    assert [status for status, _ in bad] == [400] * 5
    named = [reply["error"]["message"] for _, reply in bad]
    assert "outside the vocabulary of 85" in named[0]
    assert "empty" in named[2]
    assert "limit of 64 tokens" in named[3]
    assert status == 200
    assert good["choices"][0]["token_ids"] == tokens[len(prompt) :]
    with torch.no_grad():
        expected = torch.log_softmax(tiny_model(torch.tensor([prompt])).logits[0].double(), dim=-1)
    given = scored["choices"][0]["logprobs"]["token_logprobs"]
    assert given[1:] == [
        pytest.approx(float(expected[place, token]), abs=5e-3) for place, token in enumerate(prompt[1:])
    ]
