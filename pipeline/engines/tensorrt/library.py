"""Which TensorRT is here, and what it can do.

Two libraries have nearly one API: full TensorRT (package ``tensorrt``: builds for the GPU at hand) and TensorRT for RTX
(``tensorrt_rtx``: also compiles ahead of time for other GPUs, on a machine without any). What a version can do is
asked of the module wherever it has a name for it.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipeline.errors import BuildError

# What is known of each library: its modules, the major versions this code was written for, how to get it.
MODULES = {"tensorrt": ("tensorrt",), "tensorrt_rtx": ("tensorrt_rtx", "tensorrt_rtx_bindings")}
KNOWN = {"tensorrt": (8, 10, 11), "tensorrt_rtx": (1,)}
INSTALL = {"tensorrt": "pip install 'enginegate[tensorrt]'", "tensorrt_rtx": "pip install 'enginegate[tensorrt-rtx]'"}
OLDEST_8 = (8, 6)
NEWEST_SM_OF_8 = 90


@dataclass(frozen=True)
class Library:
    """A library that is loaded: ``name`` is a key of ``MODULES``, ``trt`` the Python module."""

    name: str
    version: str
    trt: Any

    @property
    def label(self) -> str:
        """For people and for comparing: ``tensorrt 10.3.0``."""
        return f"{self.name} {self.version}"

    @property
    def numbers(self) -> tuple[int, ...]:
        """``(10, 3, 0)``."""
        return version_numbers(self.version)

    @property
    def strongly_typed(self) -> bool:
        """Whether a network keeps the types that its graph says; else the library chooses, allowed by flags."""
        return hasattr(self.trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED")

    def graph_dtype(self, dtype: str) -> str:
        """The type of the graph's floats for an engine in ``dtype``."""
        return dtype if self.strongly_typed else "float32"

    @property
    def fp8(self) -> bool:
        """Whether it knows FP8."""
        return hasattr(self.trt.DataType, "FP8")

    @property
    def targets(self) -> list[str]:
        """The compute capabilities that it compiles for ahead of time; none: only for the GPU at hand."""
        kinds = getattr(self.trt, "ComputeCapability", None)
        names = [name for name in dir(kinds) if re.fullmatch(r"SM\d+", name)]
        return sorted((name.removeprefix("SM") for name in names), key=int)

    @property
    def timing_cache(self) -> bool:
        """Whether timings of kernels can be kept. (TensorRT for RTX has the calls, but they do nothing.)"""
        return self.name == "tensorrt"

    @property
    def opset(self) -> int:
        """The ONNX opset of the graphs that it is given (Q/DQ raises it where it must)."""
        return 18 if self.strongly_typed else 17

    def logger(self, write: Callable[[str, str], None]) -> Any:
        """Its logger, which calls ``write(severity, message)``: ``ERROR``, ``WARNING``, ``INFO``, ``VERBOSE``."""
        trt = self.trt

        class Log(trt.ILogger):  # type: ignore[misc,name-defined]
            """Passes messages on."""

            def __init__(self) -> None:
                trt.ILogger.__init__(self)

            def log(self, severity: Any, message: str) -> None:
                """Called by the library."""
                write(str(severity).rpartition(".")[2], message)

        return Log()


def version_numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: ``1.7.1.116`` is (1, 7, 1, 116), ``10.3.0b1`` is (10, 3, 0)."""
    return tuple(int(part) for part in re.findall(r"^\d+|(?<=\.)\d+", version))


def load_library(name: str = "auto", *, ahead: bool = False) -> Library:
    """Imports a library. ``auto``: the one that is installed; of both TensorRT for RTX for compiling ``ahead`` of time.

    Raises BuildError when it is not installed, does not load, or is a version that this code does not know.
    """
    order = ("tensorrt_rtx", "tensorrt") if ahead else ("tensorrt", "tensorrt_rtx")
    missing = []
    for one in order if name == "auto" else (name,):
        for module in MODULES[one]:
            try:
                trt = importlib.import_module(module)
            except (ImportError, OSError, RuntimeError) as error:  # OSError: a shared library is missing
                missing.append(f"{module}: {error}")
                continue
            if not hasattr(trt, "Builder"):  # a name that something else took, or a wheel without its libraries
                missing.append(f"{module}: it holds no TensorRT")
                continue
            return _known(Library(one, str(trt.__version__), trt))
    wanted = "tensorrt_rtx" if name == "tensorrt_rtx" or ahead else "tensorrt"
    raise BuildError(f"TensorRT is not here ({'; '.join(missing)})", INSTALL[wanted])


def _known(library: Library) -> Library:
    numbers = library.numbers
    if numbers[:1] and numbers[0] in KNOWN[library.name] and (numbers[0] != 8 or numbers >= OLDEST_8):
        return library
    known = ", ".join(map(str, KNOWN[library.name])).replace("8,", "8.6,")
    raise BuildError(
        f"{library.label} is a version that this code was not written for (known: {known})",
        f"install one of these: {INSTALL[library.name]}; or extend pipeline/engines/tensorrt/library.py",
    )


def refuse_target(library: Library, sms: list[str], here: str | None) -> None:
    """Raises BuildError for compute capabilities that the library does not compile for. ``here``: that of this GPU."""
    foreign = [sm for sm in sms if sm != here]
    if library.targets:
        if unknown := [sm for sm in sms if sm not in library.targets]:
            raise BuildError(
                f"{library.label} does not compile for SM {', '.join(unknown)} (but for {', '.join(library.targets)})",
                "use full TensorRT on that GPU (engine.tensorrt.library: tensorrt), or another engine.backend",
            )
    elif foreign:
        raise BuildError(
            f"{library.label} compiles only for the GPU at hand ({f'SM {here}' if here else 'there is none'}), "
            f"not for SM {', '.join(foreign)}",
            "run on that GPU with `engine.tensorrt.sm: []`, or compile ahead of time with library: tensorrt_rtx",
        )
    elif library.numbers[0] == 8 and int(here or 0) > NEWEST_SM_OF_8:
        raise BuildError(f"{library.label} knows no GPU newer than SM {NEWEST_SM_OF_8}", "install a newer TensorRT")
