"""What a killed calibration leaves behind, so that the next run goes on from there to the same result.

Each rank writes, every few seconds and atomically, the maxima so far and the numbers of the batches in them. The
folder is named after everything that the result depends on (checkpoint, samples, recipe, batches, precision,
versions), so a state is never taken for another input, and switching back to an earlier input finds its state again.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.errors import InputError
from pipeline.files import atomic_file, canonical_json, digest_json


@dataclass
class Saved:
    """Maxima, the batches they come from, the quantizers reached, and the smallest token budget that fitted."""

    values: dict[str, Any] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    budget: int | None = None


class Resume:
    """Saves and loads the state of one recipe below ``folder``, at most every ``every_s`` seconds."""

    def __init__(self, folder: Path, fingerprint: str, every_s: float = 30.0) -> None:
        self.folder = folder
        self.fingerprint = fingerprint  # of the checkpoint
        self._every_s = every_s
        self._last = time.monotonic()
        self._identity: dict[str, Any] = {}

    def identify(self, **parts: Any) -> None:
        """Fixes what the result depends on; before anything is loaded or saved."""
        self._identity = {"checkpoint": self.fingerprint, **parts}

    @property
    def place(self) -> Path:
        """The folder of this input's states."""
        return self.folder / digest_json(self._identity).removeprefix("sha256:")[:16]

    def due(self) -> bool:
        """Whether it is time to save."""
        return time.monotonic() - self._last >= self._every_s

    def save(self, rank: int, state: Saved) -> None:
        """Writes the state of one rank. Raises StorageError when the disk is full."""
        import torch
        from safetensors.torch import save

        done = torch.tensor(sorted(state.done), dtype=torch.int64)
        # Copies: q, k and v hold one tensor, and a file of safetensors holds none twice.
        tensors = {name: value.to("cpu", copy=True) for name, value in state.values.items()} | {"done": done}
        notes = {
            "identity": canonical_json(self._identity).decode(),
            "called": "\n".join(sorted(state.called)),
            "budget": str(state.budget or ""),
        }
        # Through bytes: the file goes to disk whole, and a full disk is an OSError with its number.
        with atomic_file(self.place / f"rank-{rank}.safetensors") as part:
            part.write_bytes(save(tensors, metadata=notes))
        self._last = time.monotonic()

    def load(self) -> Saved:
        """The states of all ranks of earlier runs, merged. Raises InputError for a file of another input."""
        import torch
        from safetensors import safe_open

        found = Saved()
        for path in sorted(self.place.glob("rank-*.safetensors")):
            try:
                with safe_open(path, framework="pt") as file:
                    notes, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            except Exception as error:
                raise InputError(f"{path}: cannot be read: {error}", "delete it; calibration starts afresh") from error
            if notes["identity"] != canonical_json(self._identity).decode():
                other = _differences(notes["identity"], self._identity)
                raise InputError(
                    f"{path}: holds the statistics of another input ({other})",
                    "delete it; calibration starts afresh",
                )
            found.done |= set(tensors.pop("done").tolist())
            for name, value in tensors.items():
                mine = found.values.get(name)
                found.values[name] = value if mine is None else torch.maximum(mine, value)
            found.called |= set(filter(None, notes["called"].split("\n")))
            if notes["budget"]:
                found.budget = min(int(notes["budget"]), found.budget or int(notes["budget"]))
        return found

    def others(self) -> int:
        """How many states of other inputs lie beside this one's."""
        return sum(path != self.place for path in self.folder.glob("*/")) if self.folder.exists() else 0

    def clear(self) -> None:
        """Forgets everything; called when the result is complete."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _differences(stored: str, wanted: Mapping[str, Any]) -> str:
    import json

    found = json.loads(stored)
    return ", ".join(sorted(key for key in {*found, *wanted} if found.get(key) != wanted.get(key)))
