"""The weights of an ONNX graph, in one file beside it and never in memory all at once.

A protobuf holds 2 GiB at most, so tensors go into ``<name>.data`` and the graph only points there (ONNX's external
data). They are written and copied one by one: lowering a 7B model needs the memory of its largest tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

INLINE = 1024  # bytes; smaller tensors stay in the graph, where shape inference sees them
_ALIGNMENT = 64
_BLOCK = 16 * 2**20

Store = Callable[[str, NDArray[Any]], Any]  # name and value of a tensor -> the TensorProto that stands for it


def in_memory(name: str, value: NDArray[Any]) -> Any:
    """A ``Store`` that keeps the tensor in the graph."""
    from onnx import numpy_helper

    return numpy_helper.from_array(np.asarray(value, order="C"), name)  # ascontiguousarray makes a scalar a vector


class WeightFile:
    """``<graph>.data`` while it is written, in a ``with`` block; ``save`` writes the graph itself."""

    def __init__(self, graph: Path) -> None:
        self._graph = graph
        self._path = graph.with_name(graph.name + ".data")
        self._held: set[str] = set()

    def __enter__(self) -> WeightFile:
        self._file = self._path.open("wb")
        return self

    def __exit__(self, *_reason: object) -> None:
        self._file.close()

    def add(self, name: str, value: NDArray[Any]) -> Any:
        """Writes an array (NumPy's types and those of ml_dtypes); returns the TensorProto that points to it."""
        from onnx import helper

        if value.nbytes < INLINE:
            return in_memory(name, value)
        value = np.ascontiguousarray(value)
        offset = self._align()
        self._file.write(value.reshape(-1).view(np.uint8).data)
        return self._pointer(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape, offset, value.nbytes)

    def save(self, model: Any, source: Path) -> None:
        """Saves the graph. Tensors that it points to elsewhere are copied from the folder ``source``."""
        import onnx

        tensors = [tensor if tensor.name in self._held else self._copy(tensor, source) for tensor in _weights(model)]
        del model.graph.initializer[:]
        model.graph.initializer.extend(tensors)
        self._file.flush()
        onnx.save_model(model, str(self._graph))

    def _copy(self, tensor: Any, source: Path) -> Any:
        if tensor.data_location != tensor.EXTERNAL:
            if len(tensor.raw_data) < INLINE:
                return tensor
            offset = self._align()
            self._file.write(tensor.raw_data)
            return self._pointer(tensor.name, tensor.data_type, tensor.dims, offset, len(tensor.raw_data))
        place = {entry.key: entry.value for entry in tensor.external_data}
        offset, left = self._align(), int(place["length"])
        with (source / place["location"]).open("rb") as file:
            file.seek(int(place.get("offset", "0")))
            while left:
                block = file.read(min(_BLOCK, left))
                if not block:
                    raise EOFError(f"{source / place['location']}: ends inside {tensor.name}")
                self._file.write(block)
                left -= len(block)
        return self._pointer(tensor.name, tensor.data_type, tensor.dims, offset, int(place["length"]))

    def _align(self) -> int:
        self._file.write(b"\0" * (-self._file.tell() % _ALIGNMENT))
        return self._file.tell()

    def _pointer(self, name: str, kind: int, shape: Any, offset: int, length: int) -> Any:
        from onnx import TensorProto

        tensor = TensorProto(name=name, data_type=kind, dims=list(shape), data_location=TensorProto.EXTERNAL)
        for key, value in (("location", self._path.name), ("offset", offset), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))
        self._held.add(name)
        return tensor


def save_graph(model: Any, path: Path, source: Path) -> None:
    """Saves a graph that is complete; see ``WeightFile.save``."""
    with WeightFile(path) as weights:
        weights.save(model, source)


def _weights(model: Any) -> list[Any]:
    return list(model.graph.initializer)
