"""A TensorRT engine on a GPU: the cache buffers, the passes over them, a CUDA graph for each shape of a step.

The cache is one region of device memory for each layer's keys and one for its values, ``[slots, kv_heads, capacity,
head_size]``. A row of a batch lives in a slot. A step runs over the first ``bucket`` slots, whatever is in them, so
a region's start is all that TensorRT must know and no cache is ever gathered. ``capacity`` starts small and grows with
the longest row, because attention reads all of it; a growth moves each region once.

Python 3.10 and nothing but NumPy: TensorRT 8.6 has no bindings for anything newer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.engines.tensorrt.graph import DecoderShape
from pipeline.errors import BuildError, ServerError

FIRST_CAPACITY = 256
LOGIT_VALUES = 2**24  # logits kept at a time: 32 or 64 MiB
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "int8": 1}
_UNITS = ((16, "uint4"), (8, "uint2"), (4, "unsigned"), (2, "unsigned short"), (1, "unsigned char"))
_ALIGNMENT = 256  # of the addresses that TensorRT takes


@dataclass(frozen=True)
class Piece:
    """A part of a prompt: ``tokens`` for ``slot``, from position ``start`` on."""

    slot: int
    start: int
    tokens: Sequence[int]


class Decoder:
    """Passes over ``slots`` sequences of up to ``max_tokens``. Nothing here waits but ``logits`` and ``scores``."""

    def __init__(
        self, engine: Any, description: Any, device: Any, *, slots: int, max_tokens: int, graphs: bool = True
    ) -> None:
        self.shape = DecoderShape(**description.cache)
        self.slots = slots
        self._engine = engine
        self._device = device
        self._graphs = graphs
        self._profiles = [
            {name: tuple(map(tuple, sizes)) for name, sizes in profile["shapes"].items()}
            for profile in description.profiles
        ]
        kinds = {binding.name: binding.dtype for binding in description.bindings}
        self._logit_kind = np.dtype(kinds["logits"])
        self._token_bytes = self.shape.head_size * _BYTES[kinds[self.shape.past[0]]]  # of one head
        self._reading, self._read_shapes = self._prefill_profile()
        self.read_tokens = self._read_shapes["input_ids"][2][1]  # in one pass, over all its rows
        self.read_rows = min(slots, self._read_shapes["input_ids"][2][0])
        self.buckets = self._accepted(_doubling(1, slots), "input_ids", 0, "batch")
        capacities = _doubling(min(FIRST_CAPACITY, max_tokens), max_tokens)
        self.capacities = self._accepted(capacities, self.shape.past[0], 2, "capacity")
        self.capacity = self.capacities[0]
        self.logit_rows = max(slots, min(LOGIT_VALUES // self.shape.vocabulary, self._read_shapes["logit_rows"][2][0]))
        self._steps: dict[tuple[int, int], Callable[[], None]] = {}
        self._contexts: dict[int, Any] = {}
        self._allocate(max_tokens)
        unit, name = next((size, name) for size, name in _UNITS if self._token_bytes % size == 0)
        self._units = self._token_bytes // unit
        device.compile(name, self._logit_kind.itemsize * 8)

    def _allocate(self, max_tokens: int) -> None:
        device, heads = self._device, self.shape.kv_heads
        if any(heads * capacity * self._token_bytes % _ALIGNMENT for capacity in self.capacities):
            raise BuildError("the cache's rows are not aligned", "make engine.max_tokens a multiple of 16, build again")
        self._region_bytes = self.slots * heads * max_tokens * self._token_bytes
        self._regions = [device.empty(self._region_bytes) for _ in self.shape.past]
        self._moving = device.empty(self._region_bytes)
        for region in (*self._regions, self._moving):  # beyond a row's length: masked, but no NaN may be there
            device.clear(region, self._region_bytes)
        read = max(self.slots, self.read_tokens)
        self._new = [device.empty(read * heads * self._token_bytes) for _ in self.shape.new]
        self._logits = device.empty(self.logit_rows * self.shape.vocabulary * self._logit_kind.itemsize)
        self._scratch = device.empty(_scratch_bytes(self._engine))
        self._ints = {
            name: device.empty(4 * rows)
            for rows, names in (
                (self.slots, ("step_ids", "step_lengths", "step_going", "step_slots")),
                (read, ("read_ids",)),
                (self.slots, ("read_lengths", "read_counts", "read_slots")),
                (self.logit_rows, ("read_rows", "given", "best", "best_log_prob", "given_log_prob")),
            )
            for name in names
        }
        self._from, self._to = (device.empty(8 * len(self._regions)) for _ in range(2))
        device.put(self._from, np.array(self._new, np.uint64))
        device.put(self._to, np.array(self._regions, np.uint64))
        device.put(self._ints["step_slots"], np.arange(self.slots, dtype=np.int32))

    def _prefill_profile(self) -> tuple[int, dict[str, Any]]:
        """The profile that takes the longest prompts: its number and shapes."""
        return max(enumerate(self._profiles), key=lambda pair: pair[1]["input_ids"][2][1])

    def _step_profiles(self, bucket: int) -> list[int]:
        """The profiles that take one token of each of ``bucket`` rows; those for the fewest rows first."""
        found = []
        for place, shapes in enumerate(self._profiles):
            (rows, width), _, (most_rows, _) = shapes["input_ids"]
            if rows <= bucket <= most_rows and width == 1:
                found.append((most_rows, place))
        return [place for _, place in sorted(found)]

    def _accepted(self, sizes: list[int], name: str, axis: int, what: str) -> list[int]:
        """Those ``sizes`` of an axis of input ``name`` that some profile for steps takes."""
        steps = [shapes for shapes in self._profiles if shapes["input_ids"][0][1] == 1]
        found = [size for size in sizes if any(s[name][0][axis] <= size <= s[name][2][axis] for s in steps)]
        if not found or found[-1] != sizes[-1]:
            raise BuildError(f"the engine has no profile for steps with {what} {sizes[-1]}", "build the engine again")
        return found

    # The cache -------------------------------------------------------------------------------------------------------

    def resize(self, tokens: int, slots: int) -> None:
        """Makes room for ``tokens`` in each slot; the first ``slots`` keep what they hold."""
        capacity = next(size for size in self.capacities if size >= tokens)
        if capacity == self.capacity:
            return
        old, new = self.capacity * self._token_bytes, capacity * self._token_bytes
        lines = slots * self.shape.kv_heads
        for region in self._regions if lines else []:
            self._device.copy((self._moving, new), (region, old), min(old, new), lines)
            self._device.copy((region, lines * new), (self._moving, lines * new), lines * new, 1)
        self.capacity = capacity

    def move(self, source: int, target: int) -> None:
        """Copies what slot ``source`` holds into slot ``target``."""
        size = self.shape.kv_heads * self.capacity * self._token_bytes
        for region in self._regions:
            self._device.copy((region + target * size, size), (region + source * size, size), size, 1)

    # Passes ----------------------------------------------------------------------------------------------------------

    def read(self, pieces: Sequence[Piece], rows: Sequence[int]) -> None:
        """Reads parts of prompts in one pass. ``rows``: the places to give logits for, counted row by row.

        Together, padded to the longest, they have ``read_tokens`` at most; one with a ``start`` goes alone.
        """
        width = max(len(piece.tokens) for piece in pieces)
        ids = np.zeros((len(pieces), width), np.int32)
        for row, piece in enumerate(pieces):
            ids[row, : len(piece.tokens)] = piece.tokens
        self._put("read_ids", ids)
        self._put("read_lengths", [piece.start for piece in pieces])
        self._put("read_counts", [len(piece.tokens) for piece in pieces])
        self._put("read_slots", [piece.slot for piece in pieces])
        self._put("read_rows", rows)
        begun = pieces[0].start > 0
        smallest = self._read_shapes[self.shape.past[0]][0][2]
        context = self._context(self._reading)
        capacity = self.capacity if begun else max(smallest, 1)
        offset = pieces[0].slot * self.shape.kv_heads * self.capacity * self._token_bytes if begun else 0
        self._bind(context, ids.shape, len(rows), (capacity, offset), ("read_ids", "read_lengths", "read_rows"))
        self._execute(context)
        self._write("read_slots", "read_lengths", "read_counts", len(pieces), width)

    def set_step(self, ids: NDArray[np.int32], lengths: NDArray[np.int32]) -> None:
        """What the next step reads: for each slot its token, and how many its buffer holds."""
        self._put("step_ids", ids)
        self._put("step_lengths", lengths)

    def set_going(self, going: NDArray[np.int32]) -> None:
        """Which slots (1, else 0) grow with each step; the others stay as they are, and their results mean nothing."""
        self._put("step_going", going)

    def step(self, bucket: int) -> None:
        """Queues one step of the first ``bucket`` slots; the next one reads what this one finds most likely."""
        key = (bucket, self.capacity)
        if key not in self._steps:
            self._steps[key] = self._record(bucket)
        self._steps[key]()

    def _record(self, bucket: int) -> Callable[[], None]:
        profile = self._step_profiles(bucket)[0]
        context = self._new_context(profile)
        self._bind(context, (bucket, 1), bucket, (self.capacity, 0), ("step_ids", "step_lengths", "step_slots"))
        self._execute(context)  # TensorRT prepares itself for these shapes; only new keys and logits are written

        def work() -> None:
            self._execute(context)
            self._write("step_slots", "step_lengths", "step_going", bucket, 1)
            self._read_logits(bucket, given=False)
            names = ("best", "step_going", "step_ids", "step_lengths")
            addresses = [self._ints[name] for name in names]
            self._device.launch("advance", (-(-bucket // 256), 1, 1), 256, addresses, (bucket,))

        return self._device.record(work) if self._graphs else work

    # Results ---------------------------------------------------------------------------------------------------------

    def logits(self, rows: int) -> NDArray[np.float32]:
        """The logits ``[rows, vocabulary]`` of the last pass."""
        found = np.empty((rows, self.shape.vocabulary), self._logit_kind)
        return self._device.get(self._logits, found).astype(np.float32, copy=False)  # type: ignore[no-any-return]

    def scores(self, given: Sequence[int]) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float32]]:
        """Of each logit row of the last pass: the log-probability of ``given``, the best token, that one's."""
        rows = len(given)
        self._put("given", given)
        self._read_logits(rows, given=True)
        kinds = {"given_log_prob": np.float32, "best": np.int32, "best_log_prob": np.float32}
        given_log_prob, best, best_log_prob = (
            self._device.get(self._ints[name], np.empty(rows, kind)) for name, kind in kinds.items()
        )
        return given_log_prob, best, best_log_prob

    def host(self) -> tuple[Any, Any]:
        """Where ``fetch`` puts the best tokens and their log-probabilities, of all slots."""
        return self._device.host((self.slots,), np.int32), self._device.host((self.slots,), np.float32)

    def fetch(self, into: tuple[Any, Any]) -> None:
        """Queues the copy of the last step's results to the host."""
        self._device.fetch(self._ints["best"], into[0])
        self._device.fetch(self._ints["best_log_prob"], into[1])

    # TensorRT and kernels --------------------------------------------------------------------------------------------

    def _context(self, profile: int) -> Any:
        if profile not in self._contexts:
            self._contexts[profile] = self._new_context(profile)
        return self._contexts[profile]

    def _new_context(self, profile: int) -> Any:
        """A context of its own; all of them work in the same scratch memory, since they run one after the other."""
        context = _own_context(self._engine, self._scratch)
        if not context.set_optimization_profile_async(profile, self._device.stream):
            raise ServerError(f"TensorRT refuses its optimisation profile {profile}", "see the log above")
        return context

    def _bind(
        self, context: Any, ids: tuple[int, ...], kept: int, cache: tuple[int, int], ints: tuple[str, str, str]
    ) -> None:
        """Sets shapes and addresses; ``cache``: the capacity to read, and where in each region that begins."""
        capacity, offset = cache
        past = (ids[0], self.shape.kv_heads, capacity, self.shape.head_size)
        shapes = {"input_ids": ids, "past_lengths": (ids[0],), "logit_rows": (kept,)}
        shapes |= dict.fromkeys(self.shape.past, past)
        addresses = {name: self._ints[own] for name, own in zip(self.shape.inputs, ints, strict=False)}
        addresses |= {name: region + offset for name, region in zip(self.shape.past, self._regions, strict=True)}
        addresses |= dict(zip(self.shape.new, self._new, strict=True)) | {"logits": self._logits}
        for name, sizes in shapes.items():
            if not context.set_input_shape(name, sizes):
                raise ServerError(f"TensorRT refuses {name} {list(sizes)}", "the engine's profiles: enginegate show")
        for name, address in addresses.items():
            context.set_tensor_address(name, address)

    def _execute(self, context: Any) -> None:
        if not context.execute_async_v3(self._device.stream):
            raise ServerError("TensorRT does not run", "see the log above")

    def _write(self, slots: str, lengths: str, counts: str, rows: int, width: int) -> None:
        """Writes the last pass' keys and values into the buffers."""
        sizes = (self.shape.kv_heads, width, self.capacity, self._units)
        grid = (len(self._regions), rows, min(-(-width * self.shape.kv_heads * self._units // 2048), 64))
        addresses = (self._from, self._to, self._ints[slots], self._ints[lengths], self._ints[counts])
        self._device.launch("write_cache", grid, 256, addresses, sizes)

    def _read_logits(self, rows: int, given: bool) -> None:
        ints = self._ints
        addresses = (self._logits, ints["given"] if given else 0, ints["best"], ints["best_log_prob"])
        sizes = (self.shape.vocabulary,)
        self._device.launch("read_logits", (rows, 1, 1), 1024, (*addresses, ints["given_log_prob"]), sizes)

    def _put(self, name: str, values: Any) -> None:
        self._device.put(self._ints[name], np.asarray(values, np.int32))


def _own_context(engine: Any, scratch: int) -> Any:
    """A context that works in memory of ours. The call for it has changed over the library's versions."""
    if hasattr(engine, "create_execution_context_without_device_memory"):
        context = engine.create_execution_context_without_device_memory()
        context.device_memory = scratch
    else:
        strategy = sys.modules[type(engine).__module__].ExecutionContextAllocationStrategy.USER_MANAGED
        context = engine.create_execution_context(strategy)
        context.set_device_memory(scratch, _scratch_bytes(engine))
    return context


def _scratch_bytes(engine: Any) -> int:
    size = engine.device_memory_size_v2 if hasattr(engine, "device_memory_size_v2") else engine.device_memory_size
    return max(int(size), _ALIGNMENT)


def _doubling(first: int, last: int) -> list[int]:
    """``first`` and its doubles below ``last``, then ``last``."""
    sizes = [first]
    while sizes[-1] < last:
        sizes.append(min(2 * sizes[-1], last))
    return sizes
