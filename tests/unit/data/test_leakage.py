"""An evaluation item in the calibration set is found in other clothes."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.leakage import normalized, overlaps

TEXT = "Añade un dispositivo nuevo a la red"


@pytest.mark.parametrize(
    "disguise",
    [
        TEXT.upper(),
        TEXT.replace(" ", " \t "),
        unicodedata.normalize("NFD", TEXT),
        TEXT + "!",
        "\N{FULLWIDTH LATIN CAPITAL LETTER A}" + TEXT[1:],
    ],
)
def test_case_space_and_unicode_form_do_not_hide_an_item(disguise: str) -> None:
    assert overlaps({"e": TEXT}, {"x": "something else", "c": disguise}) == {"e": "c"}


def test_most_of_a_long_item_inside_a_sample_is_an_overlap() -> None:
    words = [f"w{place}" for place in range(30)]
    item = " ".join(words)
    # 23 n-grams of 8 words; the sample repeats the first 28 words, 21 n-grams of the item: 91 %.
    assert overlaps({"e": item}, {"c": "start " + " ".join(words[:28]) + " end"}) == {"e": "c"}
    # The first 20 words hold 13 of 23 n-grams: 57 %, under the limit of 70 %.
    assert overlaps({"e": item}, {"c": " ".join(words[:20])}) == {}


def test_shared_short_phrases_are_no_overlap() -> None:
    assert overlaps({"e": "the device is offline"}, {"c": "the device is online"}) == {}


@given(st.text(max_size=30))
def test_normalising_twice_changes_nothing(text: str) -> None:
    once = normalized(text)
    assert normalized(once) == once
