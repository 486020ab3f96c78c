"""Leakage: evaluation items that the calibration set has seen, and near twins within it.

Two texts overlap when they are equal up to case, spacing, punctuation and Unicode form, or when they share most of
their word 3-grams. All pairs are compared, exactly: the numbers of shared n-grams are a product of two sparse
matrices, which for 10 000 x 10 000 texts takes seconds, so nothing has to be guessed by hashing (MinHash).
"""

from __future__ import annotations

import hashlib
import re
import sys
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

NGRAM = 3
# An evaluation item and a calibration text overlap from here on: shared / all n-grams of both, or
# shared / n-grams of the shorter when that one has at least LEAST of them (eight words).
JACCARD, CONTAINED, LEAST = 0.6, 0.7, 6
# Two calibration texts are near twins from here on.
NEAR = 0.7
# N-grams in more than this share of the texts (and in more than this many) are boilerplate and do not count.
COMMON_SHARE, COMMON_COUNT = 0.1, 10

Hashes = NDArray[np.uint64]
# Scripts without spaces between words: every character counts as a word.
_DENSE = r"\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"  # Thai, kana, CJK
_WORD = re.compile(rf"[{_DENSE}]|[^\W{_DENSE}]+")
_CHUNK = 256  # texts of one side in a product; bounds its memory


def folded(text: str) -> str:
    """``text`` in NFKC, case-folded, one space between words; punctuation stays."""
    if text.isascii():  # the same, faster
        return " ".join(text.lower().split())
    visible = text.translate(_invisible())
    return " ".join(unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", visible).casefold()).split())


@cache
def _invisible() -> dict[int, None]:
    """Format characters (zero-width spaces, soft hyphens, direction marks), which nobody sees."""
    return dict.fromkeys(code for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code)) == "Cf")


def normalized(text: str) -> str:
    """``text`` as words only, folded; a text without a word (``+++``) keeps its punctuation."""
    plain = folded(text)
    return " ".join(_WORD.findall(plain)) or plain


@dataclass(frozen=True)
class Shingles:
    """The word n-grams of some texts as sorted, distinct 64-bit hashes; text ``i`` has
    ``hashes[starts[i]:starts[i + 1]]``."""

    hashes: Hashes
    starts: NDArray[np.int64]

    @property
    def sizes(self) -> NDArray[np.int64]:
        """How many n-grams each text has."""
        return np.diff(self.starts)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def without(self, common: Hashes) -> Shingles:
        """The same texts without the n-grams in ``common`` (sorted)."""
        if not len(common):
            return self
        return self._select(~_within(self.hashes, common))

    def take(self, places: Sequence[int]) -> Shingles:
        """Some of the texts, in the order of ``places``."""
        return join([self.hashes[self.starts[place] : self.starts[place + 1]] for place in places])

    def matrix(self, columns: Hashes) -> Any:
        """A sparse texts x ``columns`` matrix of ones; n-grams that are not in ``columns`` (sorted) are left out."""
        from scipy.sparse import csr_matrix

        kept = self._select(_within(self.hashes, columns))
        indices = np.searchsorted(columns, kept.hashes)
        ones = np.ones(len(indices), dtype=np.int32)
        return csr_matrix((ones, indices, kept.starts), shape=(len(self), len(columns)))

    def _select(self, keep: NDArray[np.bool_]) -> Shingles:
        before = np.concatenate([[0], np.cumsum(keep)])
        return Shingles(self.hashes[keep], before[self.starts].astype(np.int64))


def _within(hashes: Hashes, known: Hashes) -> NDArray[np.bool_]:
    if not len(known):
        return np.zeros(len(hashes), dtype=bool)
    places = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
    return np.asarray(known[places] == hashes)


def join(parts: Sequence[Hashes]) -> Shingles:
    """Texts from their hashes."""
    starts = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)
    return Shingles(np.concatenate([*parts, np.empty(0, dtype=np.uint64)]), starts)


@lru_cache(maxsize=500_000)
def _word_hash(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")


def shingles(texts: Iterable[str]) -> Shingles:
    """The word 3-grams of each text. A text of fewer words has none."""
    parts = []
    for text in texts:
        words = np.array([_word_hash(word) for word in normalized(text).split()], dtype=np.uint64)
        gram = np.zeros(max(0, len(words) - NGRAM + 1), dtype=np.uint64)
        for place in range(NGRAM):  # a polynomial over the words' hashes, modulo 2**64
            gram = gram * np.uint64(0x9E3779B97F4A7C15) + words[place : place + len(gram)]
        parts.append(np.unique(gram))
    return join(parts)


def common_ngrams(texts: Shingles) -> Hashes:
    """Boilerplate: n-grams that occur in more than 10 % of the texts, and in more than 10 of them."""
    values, counts = np.unique(texts.hashes, return_counts=True)
    return np.asarray(values[counts > max(COMMON_COUNT, COMMON_SHARE * len(texts))])


def similar(left: Shingles, right: Shingles, jaccard: float, contained: float | None) -> list[list[int]]:
    """For each text of ``left`` the places in ``right`` of all texts that share enough n-grams with it."""
    columns = np.unique(left.hashes)
    one, other = left.matrix(columns), right.matrix(columns).T.tocsr()
    sizes, others = left.sizes, right.sizes
    found: list[list[int]] = [[] for _ in range(len(left))]
    for start in range(0, len(left), _CHUNK):
        product = (one[start : start + _CHUNK] @ other).tocoo()
        rows, places, shared = product.row + start, product.col, product.data
        own, theirs = sizes[rows], others[places]
        match = shared >= jaccard * (own + theirs - shared) - 1e-9
        if contained is not None:
            shorter = np.minimum(own, theirs)
            match |= (shorter >= LEAST) & (shared >= contained * shorter - 1e-9)
        for row, place in zip(rows[match].tolist(), places[match].tolist(), strict=True):
            found[row].append(place)
    return [sorted(places) for places in found]


@dataclass
class Leakage:
    """The evaluation set, indexed. An item has several texts: its source, and its source in the prompt's words.

    ``common`` are n-grams that do not count (boilerplate); more may be added once candidates were seen.
    """

    items: Mapping[str, Sequence[str]]
    common: Hashes = field(init=False)

    def __post_init__(self) -> None:
        self._equal: dict[str, list[str]] = {}
        owners, texts = [], []
        for name, variants in self.items.items():
            for text in dict.fromkeys(map(normalized, variants)):
                self._equal.setdefault(text, []).append(name)
                owners.append(name)
                texts.append(text)
        self._owners, self._texts = owners, shingles(texts)
        places: dict[str, list[int]] = {}
        for place, name in enumerate(owners):
            places.setdefault(name, []).append(place)
        whole = [
            np.unique(np.concatenate([self._texts.take([place]).hashes for place in own])) for own in places.values()
        ]
        self.common = common_ngrams(join(whole))

    def ignore(self, common: Hashes) -> None:
        """Adds boilerplate."""
        self.common = np.union1d(self.common, common)

    def items_in(self, samples: Sequence[Sequence[str]]) -> list[list[str]]:
        """For each sample, a sequence of texts, the ids of all items that overlap with one of them."""
        texts = [text for sample in samples for text in sample]
        owner = [place for place, sample in enumerate(samples) for _ in sample]
        found: list[set[str]] = [set() for _ in samples]
        clean = [normalized(text) for text in texts]
        for place, text in enumerate(clean):
            found[owner[place]].update(self._equal.get(text, ()))
        near = similar(shingles(clean).without(self.common), self._texts.without(self.common), JACCARD, CONTAINED)
        for place, hits in enumerate(near):
            found[owner[place]].update(self._owners[hit] for hit in hits)
        return [sorted(names) for names in found]

    def overlaps(self, samples: Mapping[str, Sequence[str]]) -> dict[str, str]:
        """Evaluation id -> the first sample's id, for every item that overlaps with a sample."""
        found: dict[str, str] = {}
        for name, items in zip(samples, self.items_in(list(samples.values())), strict=True):
            for item in items:
                found.setdefault(item, name)
        return found


RULE = (
    f"equal up to case, spacing, punctuation and Unicode form; or at least {JACCARD:.0%} of all word {NGRAM}-grams of "
    f"both shared; or at least {CONTAINED:.0%} of those of the shorter, if it has {LEAST} or more; "
    f"n-grams in more than {COMMON_SHARE:.0%} of the texts do not count"
)
