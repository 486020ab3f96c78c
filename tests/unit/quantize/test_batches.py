"""Every sample once, nothing padded, the budget kept."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.quantize.batches import equal_length_batches

samples_strategy = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=12), max_size=30)


@given(samples_strategy, st.integers(1, 40))
def test_every_sample_exactly_once_in_batches_of_one_length(samples: list[list[int]], budget: int) -> None:
    batches = list(equal_length_batches(samples, budget))
    assert sorted(list(sample) for batch in batches for sample in batch) == sorted(samples)
    for batch in batches:
        assert len({len(sample) for sample in batch}) == 1
        assert len(batch) == 1 or sum(map(len, batch)) <= budget


def test_the_longest_come_first() -> None:
    batches = list(equal_length_batches([[1], [1, 2, 3], [4], [5, 6]], 2))
    assert batches == [[[1, 2, 3]], [[5, 6]], [[1], [4]]]
