"""``engine.json`` and the checks before a plan is deserialised.

A plan is code for a GPU, and reading one runs code of its library: bytes that the manifest does not know are never
given to it. Nor is a plan for another GPU or another library, of which the library would only say that it failed.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipeline.engines.manifest import read_manifest
from pipeline.engines.tensorrt.library import INSTALL, Library, load_library
from pipeline.errors import BuildError, IntegrityError
from pipeline.files import read_json, write_json

PLAN = "model.plan"
DESCRIPTION = "engine.json"
# The library's names of types that differ from NumPy's (and ml_dtypes').
DTYPES = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "FP8": "float8_e4m3fn"}
_AGAIN = "build the engine again: dvc repro"


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
    ``graph.export_decoder`` returned. ``layers``: network layers by operation and type. ``summary``: builder settings.
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

    def write(self, folder: Path) -> None:
        """Writes ``engine.json``."""
        write_json(folder / DESCRIPTION, asdict(self))


def read_description(folder: Path) -> Description:
    """Reads ``engine.json``. Raises IntegrityError for one that is not of this version."""
    return _described(folder, read_json(folder / DESCRIPTION))


def _described(folder: Path, content: Any) -> Description:
    try:
        bindings = [Binding(**binding) for binding in content.pop("bindings")]
        return Description(bindings=bindings, **content)
    except (AttributeError, KeyError, TypeError) as error:
        raise IntegrityError(f"{folder / DESCRIPTION}: {error}", _AGAIN) from error


def open_plan(folder: Path, sm: str) -> tuple[Description, Any, Library]:
    """The engine of ``folder`` on a device of compute capability ``sm`` ("90"): description, ICudaEngine, library.

    Raises IntegrityError when the bytes are not those of the manifest, BuildError when the plan is for another SM or
    another TensorRT (both sides named): each before ``deserialize_cuda_engine`` is called.
    """
    plan, description = _trusted(folder)
    if sm not in description.sm:
        raise BuildError(
            f"{folder}: compiled for SM {', '.join(description.sm)}, this GPU is SM {sm}",
            "build it on this kind of GPU: an engine is a program for one",
        )
    library = load_library(description.library)
    if library.version != description.version:
        raise BuildError(
            f"{folder}: compiled by {description.library} {description.version}, here is {library.version}",
            f"install that version ({INSTALL[library.name]}), or {_AGAIN}",
        )
    errors: list[str] = []
    logger = library.logger(lambda severity, message: errors.append(message) if "ERROR" in severity else None)
    runtime = library.trt.Runtime(logger)
    engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        raise BuildError(f"{folder}: {library.label} does not load the plan: {'; '.join(errors[-3:])}", _AGAIN)
    return description, engine, library


def _trusted(folder: Path) -> tuple[bytes, Description]:
    """The plan and its description, whose bytes are those that the manifest names.

    The same bytes are hashed and used: a file that is exchanged in between changes nothing.
    """
    files = read_manifest(folder)["files"]
    contents = []
    for name in (PLAN, DESCRIPTION):
        path = folder / name
        if name not in files:
            raise IntegrityError(f"{folder}: its manifest names no {name}", _AGAIN)
        if not path.is_file():
            raise IntegrityError(f"{path}: missing", "pull or build the engine again")
        content = path.read_bytes()
        found = "sha256:" + hashlib.sha256(content).hexdigest()
        if found != files[name]:
            raise IntegrityError(
                f"{path}: {len(content)} bytes of {found[:19]}, the manifest says {files[name][:19]}",
                "it was cut short or exchanged, and was not loaded: pull or build the engine again",
            )
        contents.append(content)
    return contents[0], _described(folder, json.loads(contents[1]))
