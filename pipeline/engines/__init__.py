"""Engines: compiled artefacts in ``engines/<name>/``, each with a manifest, and what compiles and runs them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import BuildError

if TYPE_CHECKING:
    from pipeline.engines.scheduler import Executor


def load_executor(folder: Path, threads: int = 0) -> Executor:
    """Opens an engine folder with the backend that its manifest names. ``threads`` 0: one for each core."""
    from pipeline.engines.manifest import read_manifest

    manifest = read_manifest(folder)
    limits = manifest["limits"]
    if manifest["backend"] == "onnxruntime":
        from pipeline.engines.ort import OrtExecutor

        return OrtExecutor(
            folder, max_batch=limits["max_batch"], max_tokens=limits["max_tokens"], threads=threads or limits["threads"]
        )
    raise BuildError(f"{folder}: no backend named {manifest['backend']!r}", "install the release that built it")
