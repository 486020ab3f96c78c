"""Batches for calibration: samples of equal length under a token budget, so that nothing is ever padded.

A padded position would enter the activation maxima (ModelOpt's quantizers do not see the attention mask), so
accuracy would depend on the batch size. Equal lengths need no padding and no trust in how a model masks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence


def equal_length_batches(samples: Sequence[Sequence[int]], batch_tokens: int) -> Iterator[list[Sequence[int]]]:
    """Every sample exactly once, longest first (so that memory runs out at once or never).

    A batch holds samples of one length and at most ``batch_tokens`` tokens, or a single longer sample.
    """
    by_length: dict[int, list[Sequence[int]]] = defaultdict(list)
    for sample in samples:
        by_length[len(sample)].append(sample)
    for length in sorted(by_length, reverse=True):
        group = by_length[length]
        size = max(1, batch_tokens // length)
        for first in range(0, len(group), size):
            yield group[first : first + size]
