"""GPUs as NVML sees them, sampled beside a load, and what their samples add up to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Gpu:
    """One GPU: utilisation in per cent, memory in bytes, power in watts, energy since the driver was loaded in
    joules. None for what a card does not tell (old cards count no energy, parts of a card know no utilisation)."""

    utilisation: float | None
    memory: int | None
    power_w: float | None
    energy_j: float | None


class Nvml:
    """The GPUs that this process may use. ``module`` is pynvml, or a stand-in in tests."""

    def __init__(self, module: Any, visible: str | None) -> None:
        self.module = module
        module.nvmlInit()
        handles = [module.nvmlDeviceGetHandleByIndex(place) for place in range(module.nvmlDeviceGetCount())]
        names = [part.strip() for part in visible.split(",")] if visible else None
        self.handles = [
            handle
            for place, handle in enumerate(handles)
            if names is None or str(place) in names or _is_named(module.nvmlDeviceGetUUID(handle), names)
        ]

    def read(self) -> tuple[Gpu, ...]:
        """All GPUs now."""
        return tuple(map(self._gpu, self.handles))

    def _gpu(self, handle: Any) -> Gpu:
        module = self.module
        rates = self._told(module.nvmlDeviceGetUtilizationRates, handle)
        memory = self._told(module.nvmlDeviceGetMemoryInfo, handle)
        power = self._told(module.nvmlDeviceGetPowerUsage, handle)
        energy = self._told(module.nvmlDeviceGetTotalEnergyConsumption, handle)
        return Gpu(
            utilisation=None if rates is None else float(rates.gpu),
            memory=None if memory is None else int(memory.used),
            power_w=None if power is None else power / 1000,  # milliwatts
            energy_j=None if energy is None else energy / 1000,  # millijoules
        )

    def _told(self, ask: Callable[[Any], Any], handle: Any) -> Any:
        try:
            return ask(handle)
        except self.module.NVMLError_NotSupported:
            return None


def _is_named(uuid: str, names: Sequence[str]) -> bool:
    """CUDA_VISIBLE_DEVICES takes beginnings of UUIDs."""
    return any(name and uuid.startswith(name) for name in names)


def find_nvml() -> Nvml | None:
    """NVML where there is an NVIDIA driver."""
    import os

    import pynvml

    try:
        return Nvml(pynvml, os.environ.get("CUDA_VISIBLE_DEVICES"))
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return None


def gpu_summary(seen: Sequence[tuple[float, tuple[Gpu, ...]]], tokens: int) -> dict[str, Any] | None:
    """All GPUs together, from (time, GPUs) of each sample; utilisation and power are means over the time.

    None without samples, and for what one of the cards does not tell.
    """
    if not seen:
        return None
    import numpy as np

    used, memory, power, energy = (_each(seen, name) for name in ("utilisation", "memory", "power_w", "energy_j"))
    spent = None
    if energy is not None:
        spent = sum(energy[-1]) - sum(energy[0])
    elif power is not None:  # power over time gives it too
        spent = float(np.trapezoid([sum(row) for row in power], [at for at, _ in seen]))
    return {
        "count": len(seen[0][1]),
        "utilisation": None if used is None else float(np.mean(used)),
        "memory": None if memory is None else max(map(sum, memory)),
        "power_w": None if power is None else float(np.mean([sum(row) for row in power])),
        "energy_j": spent,
        "energy_per_token_j": spent / tokens if spent is not None and tokens and len(seen) > 1 else None,
    }


def _each(seen: Sequence[tuple[float, tuple[Gpu, ...]]], name: str) -> list[list[float]] | None:
    """One number of every GPU in every sample; None when one is missing."""
    rows = [[getattr(gpu, name) for gpu in gpus] for _, gpus in seen]
    return None if any(value is None for row in rows for value in row) else rows
