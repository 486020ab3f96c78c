"""Reads a quantised checkpoint: the unified Hugging Face export of ModelOpt, one layer at a time.

<module>.weight           int8 or float8 [out, in]
<module>.weight_scale     [out] or a scalar: a weight is its 8-bit value times this
<module>.input_scale      a scalar
<module>.pre_quant_scale  [in], with SmoothQuant: what the input is multiplied with before it is quantised
<module>.k_scale, .v_scale  scalars of the KV cache, with FP8 keys and values
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.engines.lowering.parameters import as_numpy
from pipeline.errors import BuildError
from pipeline.files import read_json

SCALES = ("weight_scale", "input_scale", "pre_quant_scale", "k_scale", "v_scale")


@dataclass(frozen=True)
class Layer:
    """One quantised linear layer: ``dtype`` int8 or float8_e4m3fn; ``weight_scale`` ``[out]`` or a scalar."""

    name: str
    dtype: str
    weight_scale: NDArray[np.float32]
    input_scale: float
    pre_quant_scale: NDArray[np.float32] | None


class QuantizedCheckpoint:
    """``layers`` by module path, and ``cache``: ``(decoder layer, "key" or "value")`` -> scale, empty without FP8 KV.

    Scales are read at once, weights when they are asked for. Raises BuildError for a layer that is neither INT8 nor
    FP8, and for a scale that is missing, zero or not finite.
    """

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self._shards: dict[str, Any] = {}
        with ExitStack() as stack:
            for path in sorted(folder.glob("*.safetensors")):
                # Not NumPy's reader: it knows no float8.
                shard = stack.enter_context(safe_open(str(path), framework="pt"))
                self._shards |= dict.fromkeys(shard.keys(), shard)
            self._files = stack.pop_all()
        self.layers: dict[str, Layer] = {}
        self.cache: dict[tuple[int, str], float] = {}
        for name in self._shards:
            module, _, kind = name.rpartition(".")
            if kind == "weight_scale":
                self.layers[module] = self._layer(module)
            elif kind in ("k_scale", "v_scale"):
                place = re.search(r"\.(\d+)\.", module)
                if place is None:
                    raise BuildError(f"{name}: names no decoder layer", _CALIBRATE)
                self.cache[int(place[1]), "key" if kind == "k_scale" else "value"] = self._scalar(name)
        if len(self.cache) != 2 * len({layer for layer, _ in self.cache}):
            raise BuildError(f"{folder}: a layer has a scale for its keys or its values only", _CALIBRATE)
        if _promises_cache(folder) != bool(self.cache):
            raise BuildError(f"{folder}: the KV cache is quantised according to one file, not to the other", _CALIBRATE)
        if not self.layers:
            raise BuildError(f"{folder}: holds no quantised layer", "calibrate again: dvc repro --force quantize")

    def __enter__(self) -> QuantizedCheckpoint:
        return self

    def __exit__(self, *_reason: object) -> None:
        self._files.close()

    def weight(self, module: str) -> NDArray[Any]:
        """The 8-bit weight of a layer, ``[out, in]``."""
        return as_numpy(self._shards[f"{module}.weight"].get_tensor(f"{module}.weight"))

    def rest(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Every tensor that is neither a scale nor a quantised weight, by name."""
        for name, shard in self._shards.items():
            module, _, kind = name.rpartition(".")
            if kind not in SCALES and not (kind == "weight" and module in self.layers):
                yield name, as_numpy(shard.get_tensor(name)).astype(np.float32)

    def _layer(self, module: str) -> Layer:
        kind = self._shards[f"{module}.weight"].get_slice(f"{module}.weight").get_dtype()
        dtype = {"I8": "int8", "F8_E4M3": "float8_e4m3fn"}.get(kind)
        if dtype is None:
            raise BuildError(f"{module}: weights are stored as {kind}", "choose an int8 or an fp8 recipe")
        rows = self._shards[f"{module}.weight"].get_slice(f"{module}.weight").get_shape()[0]
        scale = self._vector(f"{module}.weight_scale")
        if scale.size not in (1, rows):
            raise BuildError(f"{module}.weight_scale: {scale.size} values for {rows} outputs", _CALIBRATE)
        smooth = f"{module}.pre_quant_scale"
        return Layer(
            module,
            dtype,
            scale.reshape(()) if scale.size == 1 else scale,
            self._scalar(f"{module}.input_scale"),
            self._vector(smooth) if smooth in self._shards else None,
        )

    def _vector(self, name: str) -> NDArray[np.float32]:
        if name not in self._shards:
            raise BuildError(f"{name}: missing in the export", _CALIBRATE)
        values = as_numpy(self._shards[name].get_tensor(name)).astype(np.float32).reshape(-1)
        if not np.isfinite(values).all() or (values < 0).any() or not values.any():
            raise BuildError(f"{name}: zero, negative or not finite", _CALIBRATE)
        return values

    def _scalar(self, name: str) -> float:
        values = self._vector(name)
        if values.size != 1:
            raise BuildError(f"{name}: {values.size} values where one is expected", _CALIBRATE)
        return float(values[0])


def _promises_cache(folder: Path) -> bool:
    """Whether the export says that keys and values are quantised. (A missing scale would silently be 1.)"""
    path = folder / "hf_quant_config.json"
    said = read_json(path).get("quantization", {}).get("kv_cache_quant_algo") if path.exists() else None
    if said not in (None, "FP8"):
        raise BuildError(f"{path}: the KV cache is in {said}", "choose a recipe with an fp8 cache or with none")
    return said is not None


_CALIBRATE = "calibrate on data that reaches this layer, or exclude it in the recipe"
