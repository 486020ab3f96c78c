"""An evaluation item in the calibration set is found in other clothes, and reworded."""

from __future__ import annotations

import random
import re
import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data import leakage
from pipeline.data.leakage import Leakage, common_ngrams, folded, normalized, shingles, similar

TEXT = "Añade un dispositivo nuevo a la red"
LONG = (
    "The backup could not be restored because the target disk was removed while the copy was still running "
    "so please connect it again and start the restore from the settings page of your account"
)


def _found(item: str, sample: str) -> bool:
    return Leakage({"e": [item]}).overlaps({"x": ["something else"], "c": [sample]}) == {"e": "c"}


@pytest.mark.parametrize(
    "disguise",
    [
        TEXT.upper(),
        TEXT.replace(" ", " \t "),
        unicodedata.normalize("NFD", TEXT),
        TEXT + "!",
        "\N{FULLWIDTH LATIN CAPITAL LETTER A}" + TEXT[1:],
        TEXT.replace("dispositivo", "dis\N{SOFT HYPHEN}posi\N{ZERO WIDTH SPACE}tivo"),
        "\N{ZERO WIDTH NO-BREAK SPACE}" + TEXT,
        TEXT.replace(" ", "\N{NO-BREAK SPACE}"),
    ],
)
def test_case_space_and_unicode_form_do_not_hide_an_item(disguise: str) -> None:
    """faults.md, row "too-good score": an evaluation item in other case, spacing and Unicode form."""
    assert _found(TEXT, disguise)
    assert _found(disguise, TEXT)


@pytest.mark.parametrize(
    "reworded",
    [
        LONG.replace("removed", "unplugged"),  # one word of 34
        LONG.replace("removed", "unplugged").replace("account", "profile"),
        "Hello! " + LONG + " Thank you very much for your patience.",
        LONG.replace("please ", "").replace("again ", ""),
        LONG[: len(LONG) * 3 // 4],
    ],
)
def test_a_light_paraphrase_is_found(reworded: str) -> None:
    """faults.md, row "too-good score": a near twin of an evaluation item leaks as well."""
    assert _found(LONG, reworded)


def test_unrelated_and_merely_similar_texts_are_no_overlap() -> None:
    assert not _found("the device is offline", "the device is online")
    assert not _found("set up the kitchen light", "set up the kitchen fan and the hall light")
    words = LONG.split()
    assert not _found(LONG, " ".join(words[:8] + [f"other{place}" for place in range(20)]))


def test_the_thresholds_are_what_they_say() -> None:
    """30 words have 28 3-grams. A sample with the first 21 of them shares 19: 19 of 28 in the item, 68 %, is under
    the 70 % of the shorter; the same sample, padded to 28 n-grams, shares 19 of 37 (51 %, under 60 %)."""
    words = [f"w{place}" for place in range(30)]
    pad = [f"p{place}" for place in range(9)]
    assert not _found(" ".join(words), " ".join(words[:21] + pad))
    # One word more: 20 shared, 20 of 28 = 71 %.
    assert _found(" ".join(words), " ".join(words[:22] + pad[:8]))
    # Contained, but too short to count: 7 words have 5 n-grams, one under the least of 6.
    assert not _found(" ".join(words[:7]), " ".join(words))
    assert _found(" ".join(words[:8]), " ".join(words))


def test_scripts_without_spaces_are_compared_by_character() -> None:
    text = (
        "\u8bf7\u5728\u8bbe\u7f6e\u9875\u9762\u4e2d\u91cd\u65b0\u8fde\u63a5"
        "\u60a8\u7684\u8bbe\u5907\u7136\u540e\u518d\u8bd5\u4e00\u6b21"
    )
    assert len(normalized(text).split()) == len(text)
    assert _found(text, text[:-2])
    assert not _found(text, text[::-1])


def test_boilerplate_does_not_count() -> None:
    """A shared instruction of 20 words makes no two prompts equal."""
    instruction = " ".join(f"rule{place}" for place in range(20))
    items = {f"e{place}": [f"{instruction} item number {place} of the evaluation set"] for place in range(40)}
    found = Leakage(items)
    assert found.overlaps({"c": [f"{instruction} quite another text that nobody asked"]}) == {}
    assert found.overlaps({"c": [items["e7"][0].upper()]}) == {"e7": "c"}


def test_all_overlapping_items_of_a_sample_are_named() -> None:
    found = Leakage({"a": [LONG], "b": [LONG + " now"], "c": ["else"]})
    assert found.items_in([[LONG.lower()], ["nothing"]]) == [["a", "b"], []]


def _jaccard(one: str, other: str) -> tuple[float, float]:
    """Jaccard index and share of the shorter, by sets of tuples: the definition, spelled out."""
    sets = []
    for text in (one, other):
        words = re.findall(r"\w+", text.lower())
        sets.append({tuple(words[place : place + 3]) for place in range(len(words) - 2)})
    shared = len(sets[0] & sets[1])
    union = len(sets[0] | sets[1])
    shorter = min(map(len, sets))
    return (shared / union if union else 0.0), (shared / shorter if shorter >= 6 else 0.0)


def test_the_sparse_product_is_the_definition() -> None:
    order = random.Random(5)
    texts = [" ".join(order.choice("abcd") for _ in range(order.randint(0, 25))) for _ in range(120)]
    found = similar(shingles(texts), shingles(texts), 0.6, 0.7)
    for place, text in enumerate(texts):
        expected = []
        for number, other in enumerate(texts):
            jaccard, contained = _jaccard(text, other)
            if jaccard >= 0.6 or contained >= 0.7:
                expected.append(number)
        assert found[place] == expected


def test_no_chunk_boundary_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [" ".join(f"w{place + step}" for step in range(12)) for place in range(40)]
    whole = similar(shingles(texts), shingles(texts), 0.6, 0.7)
    monkeypatch.setattr(leakage, "_CHUNK", 7)
    assert similar(shingles(texts), shingles(texts), 0.6, 0.7) == whole
    assert whole[10] == [7, 8, 9, 10, 11, 12, 13]  # 10 n-grams each; a shift of 3 leaves 7, the 70 % that count


def test_common_ngrams_need_a_share_and_a_number() -> None:
    few = shingles(["a b c"] * 10 + ["d e f"])
    assert len(common_ngrams(few)) == 0  # ten of eleven texts, but no more than ten
    many = shingles(["a b c"] * 11 + ["d e f"])
    np.testing.assert_array_equal(common_ngrams(many), shingles(["a b c"]).hashes)
    spread = shingles([f"x{place} y z" for place in range(200)] + ["a b c"] * 20)
    assert len(common_ngrams(spread)) == 0  # 20 of 220: 9 %


@settings(max_examples=200)
@given(st.text(max_size=30))
def test_normalising_twice_changes_nothing(text: str) -> None:
    for form in (normalized, folded):
        once = form(text)
        assert form(once) == once


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [("3 + 4", "3 - 4", False), ("+++", "---", False), ("Hi  There", "hi there", True), ("a.b", "a b", False)],
)
def test_folding_keeps_punctuation_so_that_sums_stay_apart(one: str, other: str, equal: bool) -> None:
    assert (folded(one) == folded(other)) is equal
    assert normalized("+++") != normalized("---")
