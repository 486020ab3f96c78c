"""Quantised exports of the tiny checkpoint, and a project folder with stand-ins for TensorRT-LLM in it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.engines import BuildInputs
from pipeline.engines import tensorrt_llm as backend
from pipeline.engines.manifest import write_manifest
from pipeline.files import atomic_folder
from pipeline.params import Baseline, Engine, Eval, Params, TensorRTLLM
from pipeline.platform import describe_platform
from pipeline.quantize.calibrate import quantize_model
from pipeline.quantize.probe import Probe, probe_model
from pipeline.quantize.recipes import load_recipe
from pipeline.serving.arms import engine_command
from pipeline.serving.process import Server, started
from tests.standins.trtllm import ROOT, install
from tests.tiny import write_checkpoint

SAMPLES = [[*range(5, 12 + place % 3), 20 + place] for place in range(12)]


@dataclass(frozen=True)
class Exports:
    """The checkpoint, its calibrated exports, and the calibrated models' own logits."""

    checkpoint: Path
    quantized: dict[str, Path]
    probes: dict[str, Probe]


@pytest.fixture(scope="session")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Exports:
    """An untrained checkpoint and its exports."""
    import torch
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM

    root = tmp_path_factory.mktemp("exports")
    write_checkpoint(root / "checkpoint")
    quantized, probes = {}, {}
    for name in ("int8_mixed", "fp8"):
        model = AutoModelForCausalLM.from_pretrained(
            root / "checkpoint", dtype=torch.float32, attn_implementation="eager"
        ).eval()
        quantize_model(model, load_recipe(name, ROOT / "recipes"), SAMPLES, 64)
        quantized[name] = root / name
        probes[name] = probe_model(model, SAMPLES)
        export_hf_checkpoint(model, export_dir=str(root / name / "checkpoint"))
    return Exports(root / "checkpoint", quantized, probes)


@dataclass(frozen=True)
class Project:
    """A project folder, which is the working directory, with a runtime of stand-ins."""

    folder: Path
    exports: Exports
    engine: Engine

    def platform(self) -> dict[str, Any]:
        return describe_platform(Baseline(), self.engine)

    def build(self, name: str = "runtime", platform: dict[str, Any] | None = None) -> dict[str, Any]:
        """Builds ``engines/NAME`` as the stage does; returns its manifest."""
        recipe = None if name == "runtime" else load_recipe(name, ROOT / "recipes")
        found = platform or self.platform()
        backend.preflight(recipe, self.engine, found)
        with atomic_folder(Path("engines") / name) as part:
            quantized = self.exports.quantized.get(name)
            inputs = BuildInputs(self.exports.checkpoint, Path("none"), quantized, recipe, self.engine, found)
            built = backend.compile_engine(inputs, part)
            return write_manifest(part, self.describe(name, built, found))

    def describe(self, name: str, built: dict[str, Any], platform: dict[str, Any]) -> dict[str, Any]:
        return {
            "name": name,
            "recipe": None if name == "runtime" else name,
            "backend": "tensorrt_llm",
            "dtype": built["dtype"],
            "limits": {"max_batch": self.engine.max_batch, "max_tokens": self.engine.max_tokens, "threads": 0},
            "sources": {},
            "platform": platform["device"],
            "build": built,
        }

    @contextmanager
    def serving(self, name: str = "runtime") -> Iterator[Server]:
        """Serves ``engines/NAME`` as the stage does."""
        params = Params(engine=self.engine, eval=Eval(max_new_tokens=16, scored=0))
        command = engine_command(name, params, gpu=False)
        with started(command, Path("logs") / f"{name}.log", timeout_s=60) as server:
            yield server

    def changed(self, **changes: Any) -> Project:
        """The same project with other keys in ``engine.tensorrt_llm``."""
        own = replace(self.engine.tensorrt_llm, **changes)
        return replace(self, engine=replace(self.engine, tensorrt_llm=own))


@pytest.fixture
def project(tmp_path: Path, exports: Exports, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Project]]:
    """Makes the project; arguments go to ``install``."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def make(**options: Any) -> Project:
        python = install(tmp_path / "runtime", **options)
        own = TensorRTLLM(python=str(python), build_timeout_s=60)
        return Project(folder, exports, Engine(backend="tensorrt_llm", max_batch=4, max_tokens=64, tensorrt_llm=own))

    yield make
    shutil.rmtree(folder)
