"""How many items a policy needs.

With power ``p``, one-sided error ``a`` and true difference 0, the bound of a difference with variance s^2 an
item clears a margin m when n >= (z_a + z_p)^2 s^2 / m^2; for right-or-wrong metrics s^2 is the discordance
(the fraction of items on which the two arms differ), which gives the well-known 6.18 d / m^2.
"""

from __future__ import annotations

import math

from scipy import special

POWER = 0.8


def items_needed(variance: float, margin: float, confidence: float = 0.95, power: float = POWER) -> int:
    """Items for ``power`` at true difference 0. ``margin`` in units of the item scores, ``variance`` in squares.

    For a right-or-wrong metric: margin as a fraction (0.02 is 2 points) and the discordance as variance.
    """
    if margin <= 0 or variance < 0:
        raise ValueError("the margin must be more than 0 and the variance not less")
    z = float(special.ndtri(confidence) + special.ndtri(power))
    return math.ceil(z * z * variance / (margin * margin) - 1e-9)


def unseen_loss(n: int, confidence: float = 0.95) -> float:
    """The largest fraction of items that may be lost although none of ``n`` was: 1 - (1 - confidence)^(1/n)."""
    return float(1 - (1 - confidence) ** (1 / n))


def items_to_see(fraction: float, confidence: float = 0.95) -> int:
    """The smallest n whose ``unseen_loss`` is below ``fraction``: fewer items cannot certify it, whatever they show."""
    if not 0 < fraction < 1:
        return 1
    n = max(1, math.floor(math.log(1 - confidence) / math.log1p(-fraction)))
    while unseen_loss(n, confidence) >= fraction:
        n += 1
    return n
