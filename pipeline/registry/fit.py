"""Whether an engine can run on this machine: its manifest's ``validity`` against what is probed here.

TensorRT refuses a plan of another architecture or version only when it is loaded, with messages such as "expecting
compute 9.0 got compute 8.9"; here it is known before a byte is fetched.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.platform import DISTRIBUTIONS, cpu_isa, find_gpu


@dataclass(frozen=True)
class Machine:
    """What an engine meets here. ``packages`` are versions that a user said are in the serving environment."""

    cpu: str  # "x86_64 avx2 avx512 vnni"
    sm: str | None
    no_gpu: str = ""  # why there is none
    packages: Mapping[str, str] = field(default_factory=dict)

    def version(self, package: str) -> str | None:
        """The version of a package, None when it is not here."""
        if package in self.packages:
            return self.packages[package]
        for name in DISTRIBUTIONS.get(package, (package,)):
            try:
                return importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
        return None


def this_machine(sm: str | None = None, packages: Mapping[str, str] | None = None) -> Machine:
    """Probes this machine; ``sm`` and ``packages`` stand for another that is pulled for."""
    gpu, why = (None, "") if sm else find_gpu()
    return Machine(cpu_isa(), sm or (gpu.sm if gpu else None), why, packages or {})


def misfits(manifest: Mapping[str, Any], machine: Machine) -> list[str]:
    """Why the engine cannot run there, in words; empty when it can."""
    validity, found = manifest["validity"], []
    here = machine.cpu.split(" ")[0]
    if validity["machine"] not in (None, here):
        found.append(f"built for {validity['machine']}, this machine is {here}")
    if validity["sm"] and machine.sm is None:
        found.append(f"needs a GPU of SM {' or '.join(validity['sm'])}: {machine.no_gpu}")
    elif validity["sm"] and machine.sm not in validity["sm"]:
        found.append(f"built for SM {' or '.join(validity['sm'])}, this GPU is SM {machine.sm}")
    for package, wanted in sorted(validity["packages"].items()):
        version = machine.version(package)
        if version is None:
            found.append(f"needs {package} {wanted}, which is not installed here")
        elif version != wanted:
            found.append(f"needs {package} {wanted}, here is {version}")
    return found


def warnings(manifest: Mapping[str, Any], machine: Machine) -> list[str]:
    """What may make answers differ from those that were judged, though the engine runs."""
    built = (manifest["platform"].get("cpu") or "").split(" ")
    lacking = [part for part in built[1:] if part not in machine.cpu.split(" ")]
    if manifest["validity"]["sm"] or not lacking:
        return []
    return [f"it was judged on a CPU with {', '.join(lacking)}, which this one lacks: int8 answers may differ a little"]
