"""Batches made ready while the GPU works on the one before: packed by a thread, copied from page-locked memory."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from pipeline.quantize.packing import Packed

AHEAD = 3
T = TypeVar("T")


def prefetched(
    pieces: Iterable[T], build: Callable[[T, bool], Packed], device: Any, ahead: int = AHEAD
) -> Iterator[tuple[T, Packed]]:
    """Each piece with its batch on ``device``. On a CPU nothing is gained by a thread, so there is none.

    The copy is queued behind the work of the batches before it and waits for nothing on the host.
    """
    if device.type != "cuda":
        for piece in pieces:
            yield piece, build(piece, False)
        return
    ready: queue.Queue[Any] = queue.Queue(maxsize=ahead)
    stop = threading.Event()

    def put(item: Any) -> bool:
        while not stop.is_set():
            try:
                ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for piece in pieces:
                if not put((piece, build(piece, True))):
                    return
            put(None)
        except BaseException as error:  # noqa: BLE001 (raised again by the consumer)
            put(error)

    thread = threading.Thread(target=work, name="batches", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            piece, packed = item
            yield piece, packed.on(device)
    finally:
        stop.set()
        thread.join()
