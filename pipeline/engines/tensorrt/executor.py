"""Runs a TensorRT engine for the scheduler: batches of rows, each of which lives in a slot of the cache.

Joining a batch copies no cache: a newcomer's prompt is read into a free slot. Dropping rows frees their slots; only
when fewer slots would do is a row moved. The next step is queued before this one's tokens have reached the host
(``decode_greedy``): the GPU knows them first.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.engines.scheduler import Scores
from pipeline.engines.tensorrt.decoder import Decoder, Piece
from pipeline.errors import ServerError


@dataclass(eq=False)
class State:
    """A batch: the slot of each row. Its slots are free again once nothing holds the state."""

    slots: list[int]


@dataclass
class _Flight:
    """A step that is queued: for which slots, what it reads in them (None: what the step before it finds)."""

    slots: frozenset[int]
    bucket: int
    ids: NDArray[np.int32] | None
    results: tuple[Any, Any]


class TensorRTExecutor:
    """Greedy decoding over an engine folder; see ``pipeline.engines.scheduler.Executor``."""

    def __init__(
        self, folder: Path, *, max_batch: int, max_tokens: int, device: Any = None, graphs: bool = True
    ) -> None:
        """Loads the engine. ``device`` None: the first GPU. ``graphs``: replay each step as a CUDA graph."""
        from pipeline.engines.tensorrt.device import Device
        from pipeline.engines.tensorrt.plan import open_plan

        self._device = device or Device()
        description, engine, self._library = open_plan(folder, self._device.sm)
        self._decoder = Decoder(
            engine, description, self._device, slots=max_batch, max_tokens=max_tokens, graphs=graphs
        )
        self.max_batch = max_batch
        self.max_tokens = max_tokens
        self.vocab_size = self._decoder.shape.vocabulary
        self._states: weakref.WeakSet[State] = weakref.WeakSet()
        self._lengths = np.zeros(max_batch, np.int32)  # tokens that each slot's buffer holds, without steps in flight
        self._last = np.zeros(max_batch, np.int32)  # what the last step found in each slot
        self._flight: _Flight | None = None
        self._landing = [self._decoder.host(), self._decoder.host()]

    # The protocol ----------------------------------------------------------------------------------------------------

    def prefill(self, prompts: list[list[int]]) -> tuple[State, NDArray[np.float32]]:
        """Reads prompts into free slots; returns the state and the logits ``[batch, vocabulary]`` after each."""
        self._flight = None
        state = self._occupy(len(prompts), max(map(len, prompts)))
        logits = np.empty((len(prompts), self.vocab_size), np.float32)
        for rows in self._passes(prompts):
            pieces = [Piece(state.slots[row], 0, prompts[row][: self._decoder.read_tokens]) for row in rows]
            width = max(len(piece.tokens) for piece in pieces)
            self._decoder.read(pieces, [row * width + len(piece.tokens) - 1 for row, piece in enumerate(pieces)])
            for piece in self._rest(state.slots[rows[0]], prompts[rows[0]], self._decoder.read_tokens):
                self._decoder.read([piece], [len(piece.tokens) - 1])
            logits[rows] = self._decoder.logits(len(rows))
        self._lengths[state.slots] = [len(prompt) for prompt in prompts]
        return state, logits

    def decode(self, state: State, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        """One step: ``tokens [batch]`` in, logits ``[batch, vocabulary]`` out."""
        bucket = self._start(state, tokens).bucket
        self._flight = None
        self._lengths[state.slots] += 1
        return self._decoder.logits(bucket)[state.slots]

    def decode_greedy(self, state: State, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """One step: ``tokens [batch]`` in, the most likely next ones out.

        Raises ServerError for logits that are not finite.
        """
        flight = self._flight
        if flight is None or not self._fits(flight, state, tokens):
            flight = self._start(state, tokens)
        self._flight = self._run_ahead(state, flight)
        best, log_prob = (part.wait() for part in flight.results)
        if not np.isfinite(log_prob[state.slots]).all():
            raise ServerError("the logits are not finite", "the engine overflows: try another precision or recipe")
        self._lengths[state.slots] += 1
        self._last[state.slots] = best[state.slots]
        return np.asarray(best[state.slots], np.int64)

    def keep(self, state: State, rows: NDArray[np.int64]) -> None:
        """Drops all rows but ``rows``, in that order."""
        state.slots = [state.slots[row] for row in rows.tolist()]

    def join(self, state: State, other: State) -> None:
        """Appends the rows of ``other``, which stay where they are."""
        state.slots += other.slots
        other.slots = []

    def score(self, prompts: list[list[int]]) -> list[Scores]:
        """Log-probabilities along each prompt. Raises ServerError for logits that are not finite."""
        self._flight = None
        state = self._occupy(1, max(map(len, prompts)))
        return [self._score(state.slots[0], prompt) for prompt in prompts]

    # Reading ---------------------------------------------------------------------------------------------------------

    def _passes(self, prompts: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Rows to read together: as many as fit into one pass with padding; a longer prompt alone."""
        most = self._decoder.read_rows
        rows: list[int] = []
        for row in sorted(range(len(prompts)), key=lambda row: len(prompts[row])):
            full = (len(rows) + 1) * len(prompts[row]) > self._decoder.read_tokens or len(rows) == most
            if rows and full:
                yield rows
                rows = []
            rows.append(row)
        yield rows

    @staticmethod
    def _rest(slot: int, prompt: Sequence[int], step: int) -> Iterator[Piece]:
        """What follows the first ``step`` tokens, in pieces of as many."""
        for start in range(step, len(prompt), step):
            yield Piece(slot, start, prompt[start : start + step])

    def _score(self, slot: int, prompt: list[int]) -> Scores:
        step = min(self._decoder.read_tokens, self._decoder.logit_rows)
        found = []
        for piece in (Piece(slot, 0, prompt[:step]), *self._rest(slot, prompt, step)):
            count = len(piece.tokens)
            self._decoder.read([piece], range(count))
            after = [*prompt[piece.start + 1 : piece.start + count + 1], 0][:count]  # nothing follows the last
            found.append(self._decoder.scores(after))
        given, best, best_log_prob = (np.concatenate(parts) for parts in zip(*found, strict=True))
        if not np.isfinite(given[:-1]).all() or not np.isfinite(best_log_prob).all():
            raise ServerError("the logits are not finite", "the engine overflows: try another precision or recipe")
        shifted = np.concatenate([np.array([np.nan], np.float32), given[:-1]])
        return Scores(shifted, best.astype(np.int64), best_log_prob)

    # Stepping --------------------------------------------------------------------------------------------------------

    def _start(self, state: State, tokens: NDArray[np.int64]) -> _Flight:
        """Queues a step that reads ``tokens``, over as few slots as there are rows."""
        self._compact(state)
        self._resize(int(self._lengths[state.slots].max()) + 1)
        ids = np.zeros(self.max_batch, np.int32)
        ids[state.slots] = tokens
        going = np.zeros(self.max_batch, np.int32)
        going[state.slots] = 1
        self._decoder.set_step(ids, self._lengths * going)
        self._decoder.set_going(going)
        return self._launch(state, ids)

    def _launch(self, state: State, ids: NDArray[np.int32] | None) -> _Flight:
        bucket = self._bucket(state)
        self._decoder.step(bucket)
        self._landing.reverse()
        self._decoder.fetch(self._landing[0])
        return _Flight(frozenset(state.slots), bucket, ids, self._landing[0])

    def _run_ahead(self, state: State, flight: _Flight) -> _Flight | None:
        """Queues the step after ``flight``, unless something is to be arranged first."""
        longest = int(self._lengths[state.slots].max()) + 1  # once ``flight`` has run
        if flight.slots != set(state.slots) or longest + 1 > self._decoder.capacity:
            return None
        return self._launch(state, None)

    def _fits(self, flight: _Flight, state: State, tokens: NDArray[np.int64]) -> bool:
        """Whether ``flight`` is the step that ``tokens`` ask for."""
        return flight.slots >= set(state.slots) and np.array_equal(self._last[state.slots], tokens)

    # Slots -----------------------------------------------------------------------------------------------------------

    def _occupy(self, rows: int, tokens: int) -> State:
        """New rows with room for ``tokens`` each."""
        state = State(self._free(rows))
        self._states.add(state)
        self._lengths[state.slots] = 0
        self._resize(tokens)
        return state

    def _used(self) -> set[int]:
        return {slot for state in self._states for slot in state.slots}

    def _free(self, count: int) -> list[int]:
        """The lowest free slots. Raises ServerError when there are too few."""
        free = sorted(set(range(self.max_batch)) - self._used())
        if len(free) < count:
            raise ServerError(f"{count} more rows do not fit: {len(free)} of {self.max_batch} slots are free")
        return free[:count]

    def _bucket(self, state: State) -> int:
        """The smallest number of slots to run over that holds all rows of ``state``."""
        return next(bucket for bucket in self._decoder.buckets if bucket > max(state.slots))

    def _compact(self, state: State) -> None:
        """Moves the highest rows down when that makes the bucket smaller."""
        fewest = next(bucket for bucket in self._decoder.buckets if bucket >= len(state.slots))
        free = [slot for slot in range(fewest) if slot not in self._used()]
        for row, slot in enumerate(state.slots):
            if slot >= fewest and free:
                state.slots[row] = free.pop()
                self._decoder.move(slot, state.slots[row])
                self._lengths[state.slots[row]] = self._lengths[slot]

    def _resize(self, tokens: int) -> None:
        """Room for ``tokens``, and for all that the rows of living states hold. Raises ServerError beyond the limit."""
        used = self._used()
        longest = max([tokens, *(int(self._lengths[slot]) for slot in used)])
        if longest > self.max_tokens:
            raise ServerError(f"{longest} tokens are more than this engine's {self.max_tokens}")
        self._decoder.resize(longest, max(used, default=-1) + 1)
