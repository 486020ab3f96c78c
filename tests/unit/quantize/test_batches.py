"""Every sample once, the budget kept, the work shared by tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.quantize.batches import Samples, plan, share, split

lengths_strategy = st.lists(st.integers(1, 40), min_size=1, max_size=60)


@given(lengths_strategy, st.integers(1, 90), st.booleans())
def test_every_sample_exactly_once_within_the_budget(lengths: list[int], budget: int, equal: bool) -> None:
    batches = plan(lengths, budget, equal)
    assert sorted(place for batch in batches for place in batch.places) == list(range(len(lengths)))
    for batch in batches:
        inside = [lengths[place] for place in batch.places]
        assert (batch.tokens, batch.longest) == (sum(inside), max(inside))
        assert len(inside) == 1 or len(inside) * max(inside) <= budget
        assert not equal or len(set(inside)) == 1


def test_the_longest_come_first() -> None:
    assert [batch.places for batch in plan([1, 3, 1, 2], 3)] == [(1,), (3,), (0, 2)]
    assert [batch.places for batch in plan([3, 2, 2, 1], 6)] == [(0, 1), (2, 3)]
    assert [batch.places for batch in plan([3, 2, 2, 1], 6, equal=True)] == [(0,), (1, 2), (3,)]


@given(lengths_strategy, st.integers(1, 90), st.integers(1, 90))
def test_a_split_batch_holds_the_same_samples_in_order(lengths: list[int], budget: int, less: int) -> None:
    for batch in plan(lengths, budget):
        parts = split(batch, np.array(lengths), less)
        assert tuple(place for part in parts for place in part.places) == batch.places
        assert all(part.size <= less or len(part.places) == 1 for part in parts)


@given(lengths_strategy, st.integers(1, 5))
def test_ranks_share_by_tokens(lengths: list[int], ranks: int) -> None:
    """Longest first to the least loaded: no rank has more than the mean and one batch (Graham's bound)."""
    batches = plan(lengths, 1)
    shares = share(batches, range(len(batches)), ranks)
    assert sorted(number for rank in shares for number in rank) == list(range(len(batches)))
    loads = [sum(batches[number].tokens for number in rank) for rank in shares]
    assert max(loads) <= sum(loads) / ranks + max(lengths)


def test_samples_hold_what_they_were_given_and_their_digest_sees_the_cuts() -> None:
    rows = [[5, 6, 7], [8], [9, 10]]
    samples = Samples(rows)
    assert [samples[place].tolist() for place in range(len(samples))] == rows
    assert samples.tokens == 6
    assert samples.digest() == Samples(rows).digest()
    assert samples.digest() != Samples([[5, 6], [7, 8], [9, 10]]).digest()


def test_samples_take_four_bytes_a_token() -> None:
    assert Samples([[1] * 1000] * 50)._flat.nbytes == pytest.approx(4 * 50_000)
