"""Engines: compiled artefacts in ``engines/<name>/``, each with a manifest, and what compiles and runs them.

A backend is one module with the two functions of ``Backend``, and one line in ``BACKENDS``.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from pipeline.errors import BuildError

if TYPE_CHECKING:
    from pipeline.engines.scheduler import Executor

BACKENDS = {
    "onnxruntime": "pipeline.engines.ort",
}


class Backend(Protocol):
    """What a backend's module offers."""

    def compile_engine(self, plain: Path, quantized: Path | None, target: Path) -> dict[str, Any]:
        """Writes the engine's files into ``target``; returns what was built, with ``versions``, for the manifest.

        ``plain`` is the folder of the plain ONNX graph, ``quantized`` the unified export of a recipe (None: no
        quantisation). Raises BuildError.
        """

    def open_executor(self, folder: Path, *, max_batch: int, max_tokens: int, threads: int) -> Executor:
        """Opens an engine folder for decoding."""


def get_backend(name: str) -> Backend:
    """The backend of this name. Raises BuildError for an unknown one."""
    if name not in BACKENDS:
        raise BuildError(f"no backend named {name!r} (there are: {', '.join(BACKENDS)})", "set engine.backend")
    return cast(Backend, importlib.import_module(BACKENDS[name]))


def load_executor(folder: Path, threads: int = 0) -> Executor:
    """Opens an engine folder with the backend that its manifest names. ``threads`` 0: as the manifest says."""
    from pipeline.engines.manifest import read_manifest

    manifest = read_manifest(folder)
    limits = manifest["limits"]
    return get_backend(manifest["backend"]).open_executor(
        folder, max_batch=limits["max_batch"], max_tokens=limits["max_tokens"], threads=threads or limits["threads"]
    )
