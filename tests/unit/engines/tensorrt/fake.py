"""A fake GPU and a fake TensorRT, of which only the logic of our runtime is tested: no speed, no CUDA, no tactics.

``FakeDevice`` is ``pipeline.engines.tensorrt.device.Device`` over NumPy. It is as lazy as a GPU: what is queued runs
when somebody waits, in order, and no further than to what is waited for. New memory is full of NaN. The kernels are
written anew in NumPy. ``FakeEngine`` runs an ONNX graph with ONNX Runtime and, like TensorRT, takes only shapes that a
profile allows, and addresses instead of arrays.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.engines.tensorrt.graph import DecoderShape
from pipeline.engines.tensorrt.plan import Binding, Description

FLOAT8E4M3FN = 17  # ONNX's number
UNITS = {"uint4": 16, "uint2": 8, "unsigned": 4, "unsigned short": 2, "unsigned char": 1}


class FakeFetch:
    def __init__(self, device: FakeDevice, array: np.ndarray) -> None:
        self.array = array
        self._device = device
        self.event = 0

    def wait(self) -> np.ndarray:
        self._device.run(self.event)
        return self.array


class FakeDevice:
    sm = "90"
    stream = 7

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._blocks: list[np.ndarray] = []
        self._queue: list[Callable[[], None]] = []
        self._done = 0
        self._tape: list[Callable[[], None]] | None = None
        self.launches: list[str] = []  # kernels and copies that ran
        self.replays = 0

    # What runs when

    def queue(self, work: Callable[[], None]) -> None:
        (self._queue if self._tape is None else self._tape).append(work)

    def run(self, until: int) -> None:
        while self._done < until:
            self._done += 1
            self._queue[self._done - 1]()

    # Device

    def compile(self, unit: str, logit_bits: int) -> None:
        self._unit = UNITS[unit]
        self._logit_kind = {16: np.float16, 32: np.float32}[logit_bits]

    def empty(self, size: int) -> int:
        self._starts.append((self._starts[-1] + len(self._blocks[-1]) + 511) // 256 * 256 if self._starts else 4096)
        self._blocks.append(np.full(size, 0xFF, np.uint8))
        return self._starts[-1]

    def bytes(self, address: int, size: int) -> np.ndarray:
        place = bisect.bisect_right(self._starts, address) - 1
        offset = address - self._starts[place]
        assert 0 <= offset <= offset + size <= len(self._blocks[place]), "outside of the memory that was asked for"
        return self._blocks[place][offset : offset + size]

    def view(self, address: int, kind: Any, shape: Sequence[int]) -> np.ndarray:
        return self.bytes(address, int(np.prod(shape)) * np.dtype(kind).itemsize).view(kind).reshape(shape)

    def clear(self, address: int, size: int) -> None:
        self.queue(lambda: self.bytes(address, size).fill(0))

    def put(self, address: int, array: np.ndarray) -> None:
        assert self._tape is None, "a copy from pageable memory cannot be captured"
        taken = np.ascontiguousarray(array).reshape(-1).view(np.uint8).copy()
        self.queue(lambda: self.bytes(address, len(taken)).__setitem__(slice(None), taken))

    def get(self, address: int, array: np.ndarray) -> np.ndarray:
        self.run(len(self._queue))
        array.reshape(-1).view(np.uint8)[:] = self.bytes(address, array.nbytes)
        return array

    def copy(self, target: tuple[int, int], source: tuple[int, int], width: int, height: int) -> None:
        assert width <= min(target[1], source[1])

        def work() -> None:
            self.launches.append("copy")
            for line in range(height):
                taken = self.bytes(source[0] + line * source[1], width).copy()
                self.bytes(target[0] + line * target[1], width)[:] = taken

        self.queue(work)

    def launch(
        self, name: str, grid: tuple[int, int, int], threads: int, addresses: Sequence[int], sizes: Sequence[int]
    ) -> None:
        assert all(size >= 1 for size in grid)
        assert threads <= 1024

        def work() -> None:
            self.launches.append(name)
            getattr(self, f"_{name}")(grid, addresses, sizes)

        self.queue(work)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        self._tape = []
        work()
        tape, self._tape = self._tape, None

        def replay() -> None:
            self.replays += 1
            for one in tape:
                self.queue(one)

        return replay

    def host(self, shape: tuple[int, ...], kind: Any) -> FakeFetch:
        return FakeFetch(self, np.full(shape, -1, kind))

    def fetch(self, address: int, into: FakeFetch) -> None:
        def work() -> None:
            into.array.reshape(-1).view(np.uint8)[:] = self.bytes(address, into.array.nbytes)

        self.queue(work)
        into.event = len(self._queue)

    # The kernels of kernels.cu

    def _write_cache(self, grid: Any, addresses: Sequence[int], sizes: Sequence[int]) -> None:
        heads, width, capacity, units = sizes
        tensors, rows, _ = grid
        sources, targets = (self.view(address, np.uint64, (tensors,)) for address in addresses[:2])
        slots, lengths, counts = (self.view(address, np.int32, (rows,)) for address in addresses[2:])
        size = units * self._unit
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            new = self.view(source, np.uint8, (rows, heads, width, size))
            for row in range(rows):
                slot, first = int(slots[row]), int(lengths[row])
                count = min(int(counts[row]), capacity - first)
                buffer = self.view(target + slot * heads * capacity * size, np.uint8, (heads, capacity, size))
                buffer[:, first : first + count] = new[row, :, :count]

    def _read_logits(self, grid: Any, addresses: Sequence[int], sizes: Sequence[int]) -> None:
        (vocabulary,), rows = sizes, grid[0]
        logits = self.view(addresses[0], self._logit_kind, (rows, vocabulary)).astype(np.float64)
        best = self.view(addresses[2], np.int32, (rows,))
        best[:] = logits.argmax(axis=-1)
        highest = logits.max(axis=-1)
        total = highest + np.log(np.exp(logits - highest[:, None]).sum(axis=-1))
        self.view(addresses[3], np.float32, (rows,))[:] = highest - total
        if addresses[1]:
            given = self.view(addresses[1], np.int32, (rows,))
            self.view(addresses[4], np.float32, (rows,))[:] = logits[np.arange(rows), given] - total

    def _advance(self, _grid: Any, addresses: Sequence[int], sizes: Sequence[int]) -> None:
        best, going, ids, lengths = (self.view(address, np.int32, sizes) for address in addresses)
        ids[:] = best
        lengths += going


class FakeEngine:
    """An ICudaEngine over ONNX Runtime."""

    device_memory_size = 4096

    def __init__(self, folder: Path, description: Description, device: FakeDevice) -> None:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = ort.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])
        # The ends of an engine may be narrower than its graph's (8.6: a float32 graph with float16 ends).
        # ONNX Runtime takes and gives the bytes of FP8.
        types = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int32)": np.int32}
        types["tensor(float8e4m3fn)"] = np.uint8
        self.graph_kinds = {value.name: types[value.type] for value in self.session.get_inputs()}
        self.kinds = {
            binding.name: np.dtype("uint8" if binding.dtype == "float8_e4m3fn" else binding.dtype)
            for binding in description.bindings
        }
        self.inputs = [binding.name for binding in description.bindings if binding.input]
        self.outputs = [binding.name for binding in description.bindings if not binding.input]
        self.profiles = [profile["shapes"] for profile in description.profiles]
        self.device = device

    def run(self, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        """The graph's outputs."""
        import onnxruntime as ort

        values = {
            name: ort.OrtValue.ortvalue_from_numpy_with_onnx_type(feed, FLOAT8E4M3FN)
            if feed.dtype == np.uint8
            else ort.OrtValue.ortvalue_from_numpy(feed)
            for name, feed in feeds.items()
        }
        return [value.numpy() for value in self.session.run_with_ort_values(self.outputs, values)]

    def create_execution_context_without_device_memory(self) -> FakeContext:
        return FakeContext(self)


class FakeContext:
    """An IExecutionContext."""

    device_memory = 0

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}

    def set_optimization_profile_async(self, place: int, stream: int) -> bool:
        assert stream == FakeDevice.stream
        self._profile = self._engine.profiles[place]
        return True

    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool:
        low, _, high = self._profile[name]
        self._shapes[name] = tuple(shape)
        return all(a <= size <= b for a, size, b in zip(low, shape, high, strict=True))

    def set_tensor_address(self, name: str, address: int) -> bool:
        assert address % 256 == 0, "TensorRT wants aligned addresses"
        self._addresses[name] = address
        return True

    def execute_async_v3(self, stream: int) -> bool:
        assert stream == FakeDevice.stream
        engine, shapes, addresses = self._engine, dict(self._shapes), dict(self._addresses)

        def work() -> None:
            feeds = {
                name: engine.device.view(addresses[name], engine.kinds[name], shapes[name]).astype(kind)
                for name, kind in engine.graph_kinds.items()
            }
            places = feeds["past_lengths"][:, None] + np.arange(shapes["input_ids"][1])
            assert places.max() < self._limit(), "a position that the graph's tables do not have"
            for name, found in zip(engine.outputs, engine.run(feeds), strict=True):
                engine.device.view(addresses[name], engine.kinds[name], found.shape)[:] = found

        engine.device.queue(work)
        return True

    def _limit(self) -> int:
        past = next(name for name in self._engine.inputs if name.startswith("past_keys"))
        return max(profile[past][2][2] for profile in self._engine.profiles)


def describe(shape: DecoderShape, dtype: str, profiles: list[dict[str, Any]], limits: dict[str, int]) -> Description:
    """What the builder would write of an engine with this graph."""
    past = ["batch", shape.kv_heads, "capacity", shape.head_size]
    bindings = [
        Binding("input_ids", True, "int32", ["batch", "new"]),
        Binding("past_lengths", True, "int32", ["batch"]),
        Binding("logit_rows", True, "int32", ["kept"]),
        *(Binding(name, True, dtype, past) for name in shape.past),
        Binding("logits", False, dtype, ["kept", shape.vocabulary]),
        *(Binding(name, False, dtype, ["batch", shape.kv_heads, "new", shape.head_size]) for name in shape.new),
    ]
    cache = {name: getattr(shape, name) for name in ("layers", "kv_heads", "head_size", "vocabulary")}
    return Description("tensorrt", "0", ["90"], profiles, bindings, cache, limits)


def profile(shape: DecoderShape, name: str, axes: dict[str, tuple[int, int, int]]) -> dict[str, Any]:
    """A profile as ``engine.json`` has it, from the range of each axis."""

    def sizes(*dimensions: int | str) -> list[list[int]]:
        return [[axes[one][place] if isinstance(one, str) else one for one in dimensions] for place in range(3)]

    shapes = {"input_ids": sizes("batch", "new"), "past_lengths": sizes("batch"), "logit_rows": sizes("kept")}
    shapes |= {past: sizes("batch", shape.kv_heads, "capacity", shape.head_size) for past in shape.past}
    return {"name": name, "batch": list(axes["batch"]), "shapes": shapes}
