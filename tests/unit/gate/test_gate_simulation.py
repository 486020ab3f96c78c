"""How often rules accept an engine: the cells of facts/gate.md (base accuracy 70 %, 6 % discordant, budget 2 points).

A cell is (items, true drop in points): acceptance of a point comparison, of a recovery of 95 %, of McNemar's "not
significant", of the Wald bound, of Newcombe and of Tango.
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from pipeline.gate.proportions import Table, newcombe, tango

CELLS = {
    (20, 5): (0.35, 0.35, 1.00, 0.28, 0.00, 0.00),
    (100, 5): (0.14, 0.31, 0.50, 0.006, 0.004, 0.003),
    (300, 2): (0.55, 0.90, 0.67, 0.06, 0.05, 0.05),
    (300, 0): (0.94, 1.0, 0.97, 0.41, 0.39, 0.37),
    (1319, 2): (0.52, 1.0, 0.11, 0.045, 0.043, 0.042),
    (1319, 0): (1.0, 1.0, 0.97, 0.91, 0.91, 0.91),
}
MARGIN, BASE, DISCORDANT = 0.02, 0.70, 0.06


def accepted(n: int, drop: int, trials: int) -> np.ndarray:
    """Shares of acceptance, in the order of the module's docstring."""
    losses, gains = (DISCORDANT + drop / 100) / 2, (DISCORDANT - drop / 100) / 2
    shares = [BASE - losses, losses, gains, 1 - BASE - gains]
    draws, repeated = np.unique(
        np.random.default_rng(7).multinomial(n, shares, size=trials), axis=0, return_counts=True
    )
    votes = np.zeros(6)
    for row, times in zip(draws.tolist(), repeated.tolist(), strict=True):
        votes += times * np.array(_votes(Table(*row)))
    return votes / trials


def _votes(table: Table) -> list[bool]:
    difference = (table.gains - table.losses) / table.n
    changed = table.losses + table.gains
    tail = 2 * stats.binom.cdf(min(table.losses, table.gains), changed, 0.5)
    significant = tail - stats.binom.pmf(table.losses, changed, 0.5) <= 0.05  # McNemar's mid-p
    error = (max(0.0, (changed / table.n - difference**2)) / table.n) ** 0.5
    return [
        difference >= -MARGIN - 1e-12,
        table.both + table.gains >= 0.95 * (table.both + table.losses),
        not significant,
        difference - 1.6448536 * error > -MARGIN + 1e-12,
        newcombe(table, 0.95)[0] > -MARGIN,
        tango(table, 0.95)[0] > -MARGIN,
    ]


def check(cell: tuple[int, int], trials: int) -> None:
    expected = np.array(CELLS[cell])
    # Four standard errors of two simulations of this size, and the rounding of the table. Recovery and McNemar,
    # which are not our rules, have more room: their columns hang on ties at 95 % and on the variant of the test.
    room = np.array([0, 0.04, 0.06, 0, 0, 0]) + 0.006
    allowed = 4 * np.sqrt(2 * expected * (1 - expected) / min(trials, 4000)) + room
    assert (np.abs(accepted(*cell, trials) - expected) <= allowed).all()


@pytest.mark.parametrize("cell", [(20, 5), (300, 2), (300, 0)])
def test_a_few_cells(cell: tuple[int, int]) -> None:
    check(cell, trials=2000)


@pytest.mark.slow
@pytest.mark.parametrize("cell", list(CELLS))
def test_every_cell(cell: tuple[int, int]) -> None:
    check(cell, trials=20_000)


def test_score_bounds_keep_their_promise_where_point_rules_toss_a_coin() -> None:
    point, _, _, _, of_newcombe, of_tango = accepted(300, 2, trials=2000)
    assert point > 0.45
    assert of_newcombe < 0.05 + 3 * (0.05 * 0.95 / 2000) ** 0.5
    assert of_tango < 0.05 + 3 * (0.05 * 0.95 / 2000) ** 0.5
