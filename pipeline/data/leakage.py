"""Leakage: evaluation items that the calibration set has seen, up to case, spacing and Unicode form."""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Mapping

NGRAM = 8
SHARE = 0.7  # of an item's n-grams found in one calibration sample


def normalized(text: str) -> str:
    """``text`` in NFKC, case-folded, with words only, one space between them."""
    return " ".join(re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold()))


def overlaps(evaluation: Mapping[str, str], calibration: Mapping[str, str]) -> dict[str, str]:
    """Evaluation id -> calibration id for each overlap.

    An item overlaps when its normalised text is that of a sample, or when at least ``SHARE`` of its word
    ``NGRAM``-grams occur in one sample. Shorter texts have no n-grams: only equality counts for them.
    """
    texts: dict[str, str] = {}
    grams: dict[str, set[str]] = defaultdict(set)
    for name, text in calibration.items():
        clean = normalized(text)
        texts.setdefault(clean, name)
        for gram in _ngrams(clean):
            grams[gram].add(name)
    found: dict[str, str] = {}
    for name, text in evaluation.items():
        clean = normalized(text)
        if clean in texts:
            found[name] = texts[clean]
            continue
        own = _ngrams(clean)
        hits: dict[str, int] = defaultdict(int)
        for gram in own:
            for sample in grams.get(gram, ()):
                hits[sample] += 1
        if hits:
            best = max(sorted(hits), key=lambda sample: hits[sample])
            if hits[best] >= SHARE * len(own):
                found[name] = best
    return found


def _ngrams(clean: str) -> set[str]:
    words = clean.split()
    return {" ".join(words[place : place + NGRAM]) for place in range(len(words) - NGRAM + 1)}
