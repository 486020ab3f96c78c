"""Sample sizes: the figures of facts/gate.md, which follow from 6.18 d / margin^2 by hand."""

from __future__ import annotations

import pytest

from pipeline.gate.plan import items_needed, items_to_see, unseen_loss


@pytest.mark.parametrize(
    ("discordance", "margin", "expected"),
    # (1.6449 + 0.8416)^2 = 6.1826, rounded up; the last is 3091.3
    [(0.01, 0.02, 155), (0.05, 0.02, 773), (0.10, 0.02, 1546), (0.05, 0.01, 3092)],
)
def test_items_needed(discordance: float, margin: float, expected: int) -> None:
    assert items_needed(discordance, margin) == expected


def test_unseen_loss() -> None:
    assert 100 * unseen_loss(100) == pytest.approx(2.95, abs=0.005)
    assert 100 * unseen_loss(300) == pytest.approx(0.99, abs=0.005)


def test_one_point_takes_about_300_items_whatever_is_seen() -> None:
    assert items_to_see(0.01) == 299  # ln 0.05 / ln 0.99 = 298.07
    assert unseen_loss(299) < 0.01 <= unseen_loss(298)


def test_nothing_at_stake_needs_nothing() -> None:
    assert items_to_see(1.0) == 1
    assert items_needed(0.0, 0.02) == 0


@pytest.mark.parametrize(("variance", "margin"), [(0.05, 0.0), (0.05, -1.0), (-0.1, 0.02)])
def test_nonsense_is_refused(variance: float, margin: float) -> None:
    with pytest.raises(ValueError, match="margin"):
        items_needed(variance, margin)
