"""Prefetched batches: all of them in order, and no error or early end is lost in the thread."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.quantize.feed import prefetched

GPU = SimpleNamespace(type="cuda")  # a device to the loop, no device to torch


def _build(piece: int, _pinned: bool) -> Any:
    if piece < 0:
        raise ValueError(f"piece {piece}")
    return SimpleNamespace(on=lambda _device: piece * 10)


def test_all_in_order() -> None:
    assert list(prefetched(range(20), _build, GPU)) == [(piece, piece * 10) for piece in range(20)]


def test_an_error_of_the_thread_reaches_the_loop() -> None:
    found = []
    with pytest.raises(ValueError, match="piece -1"):
        for piece, _ in prefetched([1, 2, -1, 3], _build, GPU):
            found.append(piece)
    assert found == [1, 2]


def test_a_loop_that_stops_early_leaves_no_thread() -> None:
    before = threading.active_count()
    feed = prefetched(iter(int, 1), _build, GPU)  # without end
    assert next(feed) == (0, 0)
    feed.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before
