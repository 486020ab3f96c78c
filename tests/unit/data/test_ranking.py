"""A seeded order in bounded memory, whatever the order of the source."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.ranking import Ranked, by_id
from pipeline.data.rows import Row

ROWS = [Row(f"r{place:03d}", f"text {place}", "x") for place in range(200)]


def _order(rows: list[Row], keep: int = 1000, seed: int = 1) -> list[str]:
    return [row.id for row, _ in Ranked(rows, seed, "calib", keep)]


@settings(max_examples=30)
@given(st.integers(1, 300), st.randoms(use_true_random=False))
def test_the_order_depends_on_neither_memory_nor_source(keep: int, order: random.Random) -> None:
    shuffled = list(ROWS)
    order.shuffle(shuffled)
    assert _order(shuffled, keep) == _order(ROWS)


def test_seed_and_purpose_give_other_orders_and_more_rows_move_none() -> None:
    assert _order(ROWS, seed=2) != _order(ROWS)
    assert [row.id for row, _ in Ranked(ROWS, 1, "eval", 1000)] != _order(ROWS)
    half = set(_order(ROWS[:100]))
    assert [name for name in _order(ROWS) if name in half] == _order(ROWS[:100])


def test_twins_are_one_row_with_a_count() -> None:
    twins = [*ROWS, Row("a", "TEXT   7", "other"), Row("z", "Text 7", "x")]
    found = {row.id: copies for row, copies in Ranked(twins, 1, "calib", 13)}
    assert len(found) == 200
    assert found["a"] == 3  # of r007, a and z the lowest id
    assert sum(found.values()) == 202
    assert len(list(Ranked(twins, 1, "profile", 1000, key=by_id))) == 202


def test_memory_is_bounded_by_keep() -> None:
    """Every row that is still referenced is counted while the source streams."""
    import gc
    import weakref

    alive: weakref.WeakSet[Row] = weakref.WeakSet()
    most = 0

    class Source:
        passes = 0

        def __iter__(self) -> Iterator[Row]:
            nonlocal most
            self.passes += 1
            for place in range(5000):
                row = Row(f"{place}", f"text {place}", "x")
                alive.add(row)
                most = max(most, len(alive))
                yield row

    source = Source()
    ranked = Ranked(source, 1, "calib", 50)
    gc.disable()
    try:
        rows = iter(ranked)
        for _ in range(120):
            next(rows)
    finally:
        gc.enable()
    assert most <= 2 * 50 + 3  # what was kept before, what is kept now, and the row at hand
    assert (source.passes, ranked.read) == (3, 5000)


@pytest.mark.parametrize("keep", [1, 200, 201])
def test_it_ends(keep: int) -> None:
    assert len(_order(ROWS, keep)) == 200
    assert _order([], keep) == []
