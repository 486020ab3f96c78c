"""Engines: compiled artefacts in ``engines/<name>/``, each with a manifest, and what compiles and serves them.

A backend is one package beside this file with the functions of ``Backend``, and one line in ``BACKENDS``. What it
compiles is served in one of two ways: through our own server, when it offers ``open_executor``, or by a program of
its own, when it offers ``serve_command``.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from pipeline.errors import BuildError

if TYPE_CHECKING:
    from pipeline.engines.scheduler import Executor
    from pipeline.params import Engine, Params
    from pipeline.quantize.recipes import Recipe
    from pipeline.serving.process import ServerCommand

BACKENDS = {
    "onnxruntime": "pipeline.engines.onnxruntime",
    "tensorrt": "pipeline.engines.tensorrt",
    "vllm": "pipeline.engines.vllm",
    "tensorrt_llm": "pipeline.engines.tensorrt_llm",
}


@dataclass(frozen=True)
class BuildInputs:
    """What a backend compiles from; it writes into none of these folders.

    ``checkpoint`` is the folder that intake left; ``plain`` that of the plain ONNX graph (without one when the
    backend's ``plain_dtype`` is None); ``quantized`` that of the calibrated recipe (its unified Hugging Face export
    is in ``checkpoint/`` there), None for the engine without quantisation, whose ``recipe`` is None too.
    ``platform`` is ``artifacts/platform.json``. ``log``: where a backend may keep what its compiler says.
    """

    checkpoint: Path
    plain: Path
    quantized: Path | None
    recipe: Recipe | None
    engine: Engine
    platform: dict[str, Any]
    log: Path | None = None


class Backend(Protocol):
    """What every backend's package offers."""

    def preflight(self, recipe: Recipe | None, engine: Engine, platform: dict[str, Any]) -> None:
        """Raises BuildError, naming the alternative, for what cannot be built or run here.

        Called first of all, before calibration costs GPU time, and again before each build.
        """

    def plain_dtype(self, engine: Engine) -> str | None:
        """The torch dtype (by name) of the plain ONNX graph that it starts from; None: it needs no graph."""

    def compile_engine(self, inputs: BuildInputs, target: Path) -> dict[str, Any]:
        """Writes the engine's files into ``target``; returns what was built, for the manifest.

        That holds at least ``versions`` (package to version) and ``summary`` (a few words for people); ``dtype`` when
        it is not the recipe's weights in the plain graph's; ``platform`` when it is compiled for another device than
        the one at hand, and then ``unchecked``, why it cannot be run here; ``validity`` when the engine runs elsewhere
        than ``manifest.validity_of`` would say. Raises BuildError.
        """


@runtime_checkable
class ExecutorBackend(Backend, Protocol):
    """A backend whose engines run inside ``enginegate serve``."""

    def open_executor(self, folder: Path, *, max_batch: int, max_tokens: int, threads: int) -> Executor:
        """Opens an engine folder for decoding."""


@runtime_checkable
class GraphBackend(Backend, Protocol):
    """A backend that starts from a graph of its own instead of ``lowering.export``'s."""

    def export_graph(self, model: Any, engine: Engine, target: Path) -> dict[str, Any]:
        """Writes ``model.onnx`` and its data for a torch model into ``target``; returns what ``cache.json`` holds."""


@runtime_checkable
class ServerBackend(Backend, Protocol):
    """A backend whose engines are served by a program of its own, OpenAI-compatible."""

    def serve_command(self, folder: Path, params: Params, *, name: str, port: int, gpu: bool) -> ServerCommand:
        """The command line that serves an engine folder. Raises ServerError when the program is not there."""


def get_backend(name: str) -> Backend:
    """The backend of this name. Raises BuildError for an unknown one."""
    if name not in BACKENDS:
        raise BuildError(f"no backend named {name!r} (there are: {', '.join(BACKENDS)})", "set engine.backend")
    return cast(Backend, importlib.import_module(BACKENDS[name]))


def refuse_recipe(recipe: Recipe | None, backend: str) -> None:
    """Raises BuildError for a recipe that does not name ``backend`` among those that can compile it."""
    if recipe is not None and backend not in recipe.backends:
        raise BuildError(
            f"the recipe ({recipe.description}) does not run on {backend} "
            f"(but on: {', '.join(recipe.backends) or 'none'})",
            "take it out of `recipes` in params.yaml, or change engine.backend",
        )


def load_executor(folder: Path, threads: int = 0) -> Executor:
    """Opens an engine folder with the backend that its manifest names. ``threads`` 0: as the manifest says.

    Raises BuildError for a backend that serves its engines by a program of its own.
    """
    from pipeline.engines.manifest import read_manifest

    manifest = read_manifest(folder)
    limits = manifest["limits"]
    backend = get_backend(manifest["backend"])
    if not isinstance(backend, ExecutorBackend):
        raise BuildError(
            f"{folder}: engines of {manifest['backend']} are not run by this server",
            "serve it with the backend's own program (docs/serving.md)",
        )
    return backend.open_executor(
        folder, max_batch=limits["max_batch"], max_tokens=limits["max_tokens"], threads=threads or limits["threads"]
    )
