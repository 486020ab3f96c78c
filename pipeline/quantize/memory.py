"""Whether a calibration will fit, said before it starts rather than by the kernel after hours."""

from __future__ import annotations

import json
import struct
from math import prod
from pathlib import Path
from typing import Any

from pipeline.errors import InputError, QuantizationError

GIB = 2**30
# The export holds the quantised tensors while the model is still there; int8 and fp8 are at least half of 16 bits.
EXPORT = {"int8": 1.0, "fp8": 1.0, "int4": 0.5}  # bytes a weight
LIVE = 8  # tensors of a layer's widest width alive at once in a forward pass (seen on an H200, 7B shape: 5)


def weights(checkpoint: Path) -> int:
    """How many numbers the safetensors files hold, from their headers alone."""
    total = 0
    for path in sorted(checkpoint.glob("*.safetensors")):
        with path.open("rb") as file:
            try:
                (size,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(size))
            except (struct.error, ValueError, MemoryError, OverflowError) as error:
                raise InputError(f"{path}: not a safetensors file ({error})", "run `dvc repro` from intake") from error
        total += sum(prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return total


def text_config(checkpoint: Path) -> dict[str, Any]:
    """``config.json``; of a model of several parts the language model's."""
    config: dict[str, Any] = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    found: dict[str, Any] = config.get("text_config", config)
    return found


def needed(checkpoint: Path, kind: str, bytes_each: int, budget: int) -> int:
    """Bytes that one process needs: the weights, the exporter's copy, and the activations of ``budget`` tokens.

    ``kind`` is what weights become (int8, fp8, int4), ``bytes_each`` the size of a number while calibrating.
    """
    config = text_config(checkpoint)
    width = max(config.get("intermediate_size") or 0, config.get("hidden_size") or 0)
    return int(weights(checkpoint) * (bytes_each + EXPORT[kind]) + budget * width * LIVE * bytes_each)


def refuse_if_short(need: int, free: dict[str, int], spread: bool) -> None:
    """Raises QuantizationError when ``need`` bytes are not free. ``free``: bytes by device; ``spread``: over all."""
    have = sum(free.values()) if spread else next(iter(free.values()))
    if need <= have:
        return
    where = ", ".join(f"{name}: {size / GIB:.1f} GiB free" for name, size in free.items())
    step = (
        "lower calib.batch_tokens, or use a machine with more memory"
        if spread
        else "set calib.device_map: auto (GPUs and host memory together), lower calib.batch_tokens or calib.processes"
    )
    raise QuantizationError(f"calibration needs about {need / GIB:.1f} GiB ({where})", step)


def free_memory(device: Any, spread: bool, processes_here: int = 1) -> dict[str, int]:
    """Free bytes: of ``device``, or of all GPUs and the host when the model is spread over them.

    Host memory is shared by the ``processes_here`` on this machine.
    """
    import psutil
    import torch

    host = {"host": psutil.virtual_memory().available // processes_here}
    if not torch.cuda.is_available():
        return host
    places = range(torch.cuda.device_count()) if spread else [device.index or 0]
    found = {f"cuda:{place}": torch.cuda.mem_get_info(place)[0] for place in places}
    return found | host if spread else found
