"""``enginegate doctor``: what this machine can do, and what to do about what it cannot."""

from __future__ import annotations

import argparse
import json
from typing import Any

EPILOG = """\
exit code: 0 when a run of params.yaml as it is can start on this machine, 69 when a part of it is missing.

examples:
  enginegate doctor
  enginegate doctor --json | jq .backends
"""
NEXT = {
    "onnxruntime": "pip install 'enginegate[onnx]'",
    "vllm": "`make setup-vllm` makes .venv-vllm; or set baseline.vllm, or baseline.url to a server that runs already",
    "tensorrt": "optional: pip install 'enginegate[tensorrt]' on a machine with an NVIDIA GPU; or, to compile for "
    "another machine's, 'enginegate[tensorrt-rtx]' (docs/tensorrt.md)",
    "tensorrt_llm": "optional: engine.backend: tensorrt_llm in params.yaml, and where it lives (docs/tensorrt-llm.md)",
}
GIB = 2**30


def register(subparsers: Any) -> None:
    """Declares the command."""
    parser = subparsers.add_parser(
        "doctor",
        help="what this machine can do, and why not",
        description="Looks for the GPU, the backends, disk, memory and tools, and names the next step for each gap.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Looks and prints; 0 when the backends that params.yaml needs are there."""
    from pipeline.errors import ServerError
    from pipeline.params import load_params

    params = load_params()
    found = examine(params)
    needed = sorted({str(params.engine.backend), "vllm"})
    missing = [name for name in needed if not found["backends"][name]["available"]]
    if args.json:
        print(json.dumps(found | {"missing": missing}, indent=2, ensure_ascii=False))
    else:
        print("\n".join(as_lines(found, missing)))
    return ServerError.exit_code if missing else 0


def examine(params: Any) -> dict[str, Any]:
    """Everything that the command shows, as JSON data."""
    import os
    import platform
    import shutil
    import sys
    from pathlib import Path

    import psutil

    from pipeline.platform import describe_platform, find_gpu

    described = describe_platform(params.baseline, params.engine)
    disk = shutil.disk_usage(".")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {
        **described,
        "no_gpu": find_gpu()[1],
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / GIB, 1),
        "memory_free_gib": round(psutil.virtual_memory().available / GIB, 1),
        "disk_free_gib": round(disk.free / GIB, 1),
        "tools": {name: shutil.which(name, path=path) for name in ("git", "dvc", "gto")},
    }


def as_lines(found: dict[str, Any], missing: list[str]) -> list[str]:
    """The same for people: one line a fact, an arrow before each next step."""
    device = found["device"]
    gpu = f"{device['gpu']}, SM {device['sm']}, driver {device['driver']}, CUDA {device['cuda']}"
    lines = [
        f"{'gpu':<13} {gpu if device['gpu'] else 'none: ' + found['no_gpu']}",
        f"{'cpu':<13} {device['cpu']}, {found['cores']} cores",
        f"{'memory':<13} {found['memory_free_gib']} GiB free of {found['memory_gib']}",
        f"{'disk':<13} {found['disk_free_gib']} GiB free here",
        f"{'python':<13} {found['python']} on {found['system']}",
    ]
    for name, path in found["tools"].items():
        lines.append(f"{name:<13} {path or 'not found: install it'}")
    lines.append("")
    for name, backend in sorted(found["backends"].items(), key=lambda pair: not pair[1]["available"]):
        if backend["available"]:
            lines.append(f"{name:<13} yes  {backend['version'] or 'version unknown until it is started'}")
            lines += [f"{'':<18} {detail}" for detail in details(found.get(name))]
        else:
            lines.append(f"{name:<13} no   {backend['why_not']}")
            lines.append(f"{'':<18} -> {NEXT[name]}")
    if not device["gpu"]:
        lines += ["", "Without a GPU the baseline runs in float32 and the engine on the CPU; the report says so."]
    verdict = f"Missing for params.yaml as it is: {', '.join(missing)}." if missing else "Ready: run `dvc repro`."
    return [*lines, "", verdict]


def details(section: dict[str, Any] | None) -> list[str]:
    """What a backend's own environment holds, where it has one: ``tensorrt_llm`` of the platform."""
    if not section:
        return []
    gpus = ", ".join(f"{gpu['gpu']} (SM {gpu['sm']}, {gpu['memory_mib'] / 1024:.0f} GiB)" for gpu in section["gpus"])
    versions = ", ".join(f"{name} {version}" for name, version in sorted(section["versions"].items()))
    lines = [
        f"profile {section['profile']}: {', '.join(section['programs'])}",
        f"{versions}, Python {section['python']}",
        f"sees {gpus}",
    ]
    return lines + [f"not looked up: {what}: {why}" for what, why in sorted(section["cannot"].items())]
