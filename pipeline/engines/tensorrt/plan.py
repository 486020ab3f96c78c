"""``engine.json`` and the checks before a plan is deserialised: a plan is code, so nothing foreign is ever loaded."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PLAN = "model.plan"
DESCRIPTION = "engine.json"


@dataclass(frozen=True)
class Binding:
    """An input or output: ``shape`` holds sizes and axis names; ``dtype`` is NumPy's name (``float8_e4m3fn`` too)."""

    name: str
    input: bool
    dtype: str
    shape: list[int | str]


@dataclass(frozen=True)
class Description:
    """``engine.json``: what the builder knows of a plan.

    ``library`` and ``version``: the TensorRT that made it, and the only one that may read it. ``sm``: the compute
    capabilities that it holds code for ("89"). ``profiles``: as ``profiles.Profile``. ``cache``: what
    ``graph.export_decoder`` returned. ``layers``: network layers by precision. ``summary``: opset, network size.
    """

    library: str
    version: str
    sm: list[str]
    profiles: list[dict[str, Any]]
    bindings: list[Binding]
    cache: dict[str, Any]
    limits: dict[str, int]
    layers: dict[str, int] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)


def open_plan(folder: Path, sm: str) -> tuple[Description, Any, Any]:
    """The engine of ``folder`` on a device of compute capability ``sm`` ("90"): description, ICudaEngine, Library.

    Raises IntegrityError when the bytes are not those of the manifest, BuildError when the plan is for another SM or
    another TensorRT (both sides named): each before ``deserialize_cuda_engine`` is called.
    """
    raise NotImplementedError
