"""What this environment is (``look``, a second) and which names its TensorRT-LLM knows (``probe``, imports it)."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import Any

# Names under which the packages are published, the usual one first.
DISTRIBUTIONS = {
    "tensorrt_llm": ("tensorrt_llm",),
    "tensorrt": ("tensorrt", "tensorrt_cu13", "tensorrt_cu12"),
    "torch": ("torch",),
    "modelopt": ("nvidia-modelopt",),
    "transformers": ("transformers",),
}
PROGRAMS = ("trtllm-build", "trtllm-serve")
# `trtllm-serve MODEL` is short for `trtllm-serve serve MODEL`; only the latter has these options in its help.
HELP = {"trtllm-build": ("trtllm-build", "--help"), "trtllm-serve": ("trtllm-serve", "serve", "--help")}
HELP_TIMEOUT_S = 300
CLASSES = {
    "SamplingParams": "tensorrt_llm.SamplingParams",
    "KvCacheConfig": "tensorrt_llm.llmapi.KvCacheConfig",
    "CompletionRequest": "tensorrt_llm.serve.openai_protocol.CompletionRequest",
}
ENGINE_CLASSES = {"BuildConfig": "tensorrt_llm.BuildConfig", "LLM": "tensorrt_llm.llmapi.llm_args.TrtLlmArgs"}
PYTORCH_CLASSES = {"LLM": "tensorrt_llm.llmapi.llm_args.TorchLlmArgs"}
_GPU_FIELDS = ("name", "compute_cap", "driver_version", "memory.total", "memory.free")


def look() -> dict[str, Any]:
    """Versions, programs and GPUs, without importing anything heavy."""
    gpus, why = _gpus()
    return {
        "python": platform.python_version(),
        "versions": {name: version for name in DISTRIBUTIONS if (version := _version(name))},
        "programs": [name for name in PROGRAMS if shutil.which(name)],
        "gpus": gpus,
        "no_gpu": why,
        "cuda": _cuda(),
    }


def probe() -> dict[str, Any]:
    """``look``, whether the engine backend can be imported, and the names that this version knows.

    ``cannot`` says, for each thing that could not be looked up, why.
    """
    found = look()
    with ThreadPoolExecutor() as pool:  # each of them imports TensorRT-LLM, which takes a while
        helps = {name: pool.submit(_flags, command) for name, command in HELP.items() if name in found["programs"]}
        cannot: dict[str, str] = {}
        names: dict[str, list[str]] = {}
        engine = _import("tensorrt_llm._tensorrt_engine.LLM", cannot) is not None
        classes = CLASSES | (ENGINE_CLASSES if engine else PYTORCH_CLASSES)
        for name, path in classes.items():
            known = _import(path, cannot)
            if known is not None:
                names[name] = _fields(known)
        for name, help_of in helps.items():
            names[name], problem = help_of.result()
            if problem:
                cannot[" ".join(HELP[name])] = problem
    return found | {"engine_importable": engine, "names": names, "cannot": cannot}


def _version(name: str) -> str | None:
    for distribution in DISTRIBUTIONS[name]:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _gpus() -> tuple[list[dict[str, Any]], str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").strip()
    chosen = [f"--id={visible}"] if visible else []
    query = [f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader,nounits"]
    text, problem = _output(["nvidia-smi", *chosen, *query])
    rows = [[field.strip() for field in line.split(",")] for line in text.splitlines() if line.strip()]
    if problem or not rows or any(len(row) != len(_GPU_FIELDS) for row in rows):
        return [], problem or f"nvidia-smi printed {text.strip()[:200]!r}"
    return [
        {
            "gpu": name,
            "sm": capability.replace(".", ""),
            "driver": driver,
            "memory_mib": int(total),
            "memory_free_mib": int(free),
        }
        for name, capability, driver, total, free in rows
    ], ""


def _cuda() -> str | None:
    text, _ = _output(["nvidia-smi"])
    match = re.search(r"CUDA (?:UMD )?Version\s*:\s*([\d.]+)", text)
    return match.group(1) if match else None


def _import(path: str, cannot: dict[str, str]) -> Any:
    """What a dotted path names, or None with the reason in ``cannot``."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # noqa: BLE001  an import of this package can fail in any way; each is an answer
        cannot[path] = f"{type(error).__name__}: {error}"
        return None


def _fields(known: Any) -> list[str]:
    """The names of a pydantic model's or a dataclass's fields, and of a plain class's annotations."""
    if hasattr(known, "model_fields"):
        return sorted(known.model_fields)
    if dataclasses.is_dataclass(known):
        return sorted(field.name for field in dataclasses.fields(known))
    return sorted(getattr(known, "__annotations__", {}))


def _flags(command: tuple[str, ...]) -> tuple[list[str], str]:
    """The long options in a program's help, and what went wrong."""
    text, problem = _output(list(command), HELP_TIMEOUT_S)
    return sorted(set(re.findall(r"(?<![\w-])--[A-Za-z][\w-]*", text))), problem


def _output(command: list[str], timeout_s: float = 30) -> tuple[str, str]:
    """What a command prints, and why it failed (empty when it did not)."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    if done.returncode:
        return done.stdout, f"exit code {done.returncode}: {(done.stdout + done.stderr).strip()[-300:]}"
    return done.stdout, ""
