"""What this machine is and which backends it has: ``artifacts/platform.json`` and ``enginegate doctor``.

An engine belongs to the platform that it was compiled for, so ``build`` and ``bench`` depend on this file and are
run again when it changes. It is looked up anew in every run, so it must be quick (nothing heavy is imported:
packages are asked for their metadata only) and equal on an equal machine (no time, no path, no free memory).
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.params import Baseline, Engine

CPUINFO = Path("/proc/cpuinfo")
# Names of the kernels that inference libraries choose between, with the CPU flags that allow them, narrow to wide.
_ISA = {
    "avx2": {"avx2"},
    "avx512": {"avx512f"},
    "vnni": {"avx512_vnni", "avx_vnni", "avx512vnni"},
    "amx": {"amx_int8"},
    "neon": {"asimd"},
    "dotprod": {"asimddp"},
    "i8mm": {"i8mm"},
    "sve": {"sve"},
}
# Distributions under which a package is known, the plain name first.
DISTRIBUTIONS = {
    "onnxruntime": ("onnxruntime", "onnxruntime-gpu"),
    "tensorrt": ("tensorrt", "tensorrt-cu13", "tensorrt-cu12"),
    "tensorrt_rtx": ("tensorrt-rtx", "tensorrt-rtx-cu13-bindings", "tensorrt-rtx-cu12-bindings"),
    "tensorrt_llm": ("tensorrt-llm",),
}


@dataclass(frozen=True)
class Gpu:
    """The first GPU that this process may use."""

    name: str
    sm: str  # "90" for compute capability 9.0
    driver: str
    cuda: str | None  # the newest CUDA that the driver runs


@dataclass(frozen=True)
class Backend:
    """Whether a backend can be used here; ``why_not`` is empty when it can."""

    version: str | None
    available: bool
    why_not: str = ""


def describe_platform(baseline: Baseline, engine: Engine | None = None) -> dict[str, Any]:
    """The platform as JSON: ``device`` (what an engine is compiled for) and ``backends``.

    For ``engine.backend`` tensorrt_llm also ``tensorrt_llm``: its own environment, which is asked what it can do.
    """
    gpu, no_gpu = find_gpu()
    backends = find_backends(baseline, no_gpu, engine.tensorrt.library if engine else "auto")
    own: dict[str, Any] = {}
    if engine is not None and engine.backend == "tensorrt_llm":
        from pipeline.engines.tensorrt_llm.capabilities import describe

        own = describe(engine)
        versions = own.get("versions", {})
        backends["tensorrt_llm"] = Backend(versions.get("tensorrt_llm"), not own["why_not"], own["why_not"])
        backends["tensorrt"] = replace(backends["tensorrt"], version=versions.get("tensorrt"))
    return {
        "device": {
            "gpu": gpu.name if gpu else None,
            "sm": gpu.sm if gpu else None,
            "driver": gpu.driver if gpu else None,
            "cuda": gpu.cuda if gpu else None,
            "tensorrt": backends["tensorrt"].version,
            "cpu": cpu_isa(),
        },
        "backends": {name: vars(backend) for name, backend in backends.items()},
        **({"tensorrt_llm": own} if own else {}),
    }


def cpu_isa(cpuinfo: Path = CPUINFO) -> str:
    """The CPU as far as engines care: ``x86_64 avx2 avx512 vnni``, the same on every machine with these kernels."""
    flags: set[str] = set()
    if cpuinfo.exists():  # Linux
        found = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo.read_text(encoding="utf-8"), re.MULTILINE)
        flags = set(found.group(1).split()) if found else set()
    return " ".join([platform.machine(), *(name for name, needs in _ISA.items() if needs & flags)])


def find_gpu() -> tuple[Gpu | None, str]:
    """The GPU, or None and why there is none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return None, "CUDA_VISIBLE_DEVICES hides every GPU"
    program = shutil.which("nvidia-smi")
    if program is None:
        return None, "no NVIDIA driver (nvidia-smi is not on the PATH)"
    chosen = [f"--id={visible.split(',')[0].strip()}"] if visible else []
    asked = _output([program, *chosen, "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"])
    fields = [field.strip() for field in asked.splitlines()[0].split(",")] if asked.strip() else []
    if len(fields) != 3:
        return None, f"nvidia-smi shows no GPU: {asked.strip() or 'it printed nothing'}"
    cuda = re.search(r"CUDA (?:UMD )?Version\s*:\s*([\d.]+)", _output([program]))
    return Gpu(fields[0], fields[1].replace(".", ""), fields[2], cuda.group(1) if cuda else None), ""


def find_backends(baseline: Baseline, no_gpu: str, library: str = "auto") -> dict[str, Backend]:
    """Every backend by name. ``no_gpu`` says why there is no GPU (empty: there is one)."""
    found = {name: _installed(names) for name, names in DISTRIBUTIONS.items()}
    rtx = found.pop("tensorrt_rtx")
    if library == "tensorrt_rtx" or (library == "auto" and rtx.available and not found["tensorrt"].available):
        # It serves the same backend, and is another library: its version says so.
        found["tensorrt"] = replace(rtx, version=rtx.version and f"tensorrt_rtx {rtx.version}")
    for name in ("tensorrt", "tensorrt_llm"):
        if found[name].available and no_gpu:
            found[name] = Backend(found[name].version, False, no_gpu)
    return found | {"vllm": _vllm(baseline)}


def _installed(names: tuple[str, ...]) -> Backend:
    for name in names:
        try:
            return Backend(importlib.metadata.version(name), True)
        except importlib.metadata.PackageNotFoundError:
            continue
    return Backend(None, False, "not installed in this environment")


def _vllm(baseline: Baseline) -> Backend:
    """vLLM lives in an environment of its own: its version is read from the packages beside its program."""
    if baseline.url:
        return Backend(None, True)
    program = shutil.which(baseline.vllm)
    if program is None:
        return Backend(None, False, f"{baseline.vllm} is not there")
    folders = sorted(str(path) for path in Path(program).parent.parent.glob("lib/python3*/site-packages"))
    for distribution in importlib.metadata.distributions(name="vllm", path=folders):
        return Backend(distribution.version, True)
    return Backend(None, True)  # a program that is no Python package, such as a container's wrapper


def _output(command: list[str]) -> str:
    """What a command prints; its complaint when it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"error: {error}"
    return done.stdout if done.returncode == 0 else done.stdout + done.stderr
