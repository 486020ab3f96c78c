from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.records import Item, Record
from pipeline.report.changes import changed_answers, word_differences


def joined(pieces: list[tuple[str, bool]]) -> str:
    return "".join(text for text, _ in pieces)


def test_only_the_differing_words_are_marked() -> None:
    one, other = word_differences("la luz de la cocina", "la luz del salón")
    assert one == [("la luz", False), (" de la cocina", True)]
    assert other == [("la luz", False), (" del salón", True)]


def test_an_empty_answer() -> None:
    assert word_differences("a b", "") == ([("a b", True)], [])


@given(st.text("ab \n<&", max_size=20), st.text("ab \n<&", max_size=20))
def test_nothing_but_trailing_space_is_lost(one: str, other: str) -> None:
    pieces = word_differences(one, other)
    assert joined(pieces[0]) == one.rstrip()
    assert joined(pieces[1]) == other.rstrip()
    if one.split() == other.split():
        assert not any(differs for side in pieces for _, differs in side)


def test_worst_first_and_counts() -> None:
    items = [Item(str(place), "s", "la casa azul grande", (1,)) for place in range(4)]
    before = ["la casa azul grande", "la casa", "la casa azul", "igual"]
    after = ["perro", "la casa azul grande", "la casa roja", "igual"]
    records = [[Record(str(n), (1,), (2,), text, "stop") for n, text in enumerate(texts)] for texts in (before, after)]
    found = changed_answers(items, records[0], records[1], examples=2)
    assert (found["items"], found["changed"], found["worse"], found["better"]) == (4, 3, 2, 1)
    assert [row["id"] for row in found["examples"]] == ["0", "2"]
    assert found["examples"][0]["baseline_chrf"] == 100.0
