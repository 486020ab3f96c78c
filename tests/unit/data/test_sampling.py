"""Both sets: the count asked is the count used, disjoint, seeded, nothing cut."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from pipeline.data.card import data_card
from pipeline.data.sampling import length_tag, sample
from pipeline.data.sources import Row
from pipeline.errors import DataError
from pipeline.params import Calib, Data, Engine, Eval, Params, Prompt
from tests.tiny import PROMPT, rows, tokenizer

PARAMS = Params(
    prompt=Prompt(template="plain", user=PROMPT),
    calib=Calib(samples=50, max_tokens=64, batch_tokens=256),
    eval=Eval(samples=40, max_new_tokens=16),
    engine=Engine(max_tokens=64),
)


def _rows(count: int, seed: int, first_id: int = 0) -> list[Row]:
    return [Row(row["id"], row["source"], row["target"], row["group"]) for row in rows(count, seed, first_id)]


CALIB, EVAL = _rows(100, 1), _rows(100, 2, first_id=1000)


def test_the_counts_asked_are_the_counts_used() -> None:
    sampled = sample(PARAMS, CALIB, EVAL, tokenizer())
    assert len(sampled.calibration) == 50
    assert len(sampled.evaluation) == 40
    assert sampled.overlaps == {}
    words = tokenizer()
    first = sampled.calibration[0]
    source = next(row for row in CALIB if row.id == first["id"])
    text = PROMPT.replace("{source}", source.source) + " " + source.target
    assert first["token_ids"] == words(text)["input_ids"]


def test_the_draw_does_not_depend_on_the_order_of_the_source() -> None:
    shuffled = random.Random(3).sample(CALIB, len(CALIB))
    assert sample(PARAMS, CALIB, EVAL, tokenizer()) == sample(PARAMS, shuffled, EVAL, tokenizer())
    other = sample(replace(PARAMS, seed=18), CALIB, EVAL, tokenizer())
    assert other.calibration != sample(PARAMS, CALIB, EVAL, tokenizer()).calibration


def test_an_evaluation_item_in_the_calibration_rows_is_left_out_and_counted() -> None:
    leak = replace(EVAL[0], id="leak", source=EVAL[0].source.upper() + " .")
    every = replace(PARAMS, calib=replace(PARAMS.calib, samples=1000), eval=replace(PARAMS.eval, samples=100))
    sampled = sample(every, [*CALIB, leak], EVAL, tokenizer())
    assert "leak" not in {row["id"] for row in sampled.calibration}
    assert sampled.counts["calib_left_out_overlap"] == 1
    assert sampled.counts["calib_used"] == 100


def test_long_samples_are_left_out_whole() -> None:
    long = Row("long", " ".join(["a1"] * 70), "b1", None)
    every = replace(PARAMS, calib=replace(PARAMS.calib, samples=1000))
    sampled = sample(every, [*CALIB, long], [*EVAL, replace(long, id="long-eval")], tokenizer())
    assert sampled.counts["calib_left_out_too_long"] == 1
    assert max(len(row["token_ids"]) for row in sampled.calibration) <= 64


def test_duplicates_count_once() -> None:
    twin = replace(CALIB[0], id="twin", source=CALIB[0].source + "  ")
    every = replace(PARAMS, calib=replace(PARAMS.calib, samples=1000))
    sampled = sample(every, [*CALIB, twin], EVAL, tokenizer())
    assert sampled.counts["calib_left_out_duplicate"] == 1


def test_empty_sets_and_repeated_ids_are_refused() -> None:
    with pytest.raises(DataError, match="the evaluation set is empty after filtering"):
        sample(replace(PARAMS, eval=replace(PARAMS.eval, max_words=1)), CALIB, EVAL, tokenizer())
    with pytest.raises(DataError, match="no calibration sample is left"):
        sample(replace(PARAMS, calib=replace(PARAMS.calib, max_tokens=8)), CALIB, EVAL, tokenizer())
    with pytest.raises(DataError, match="calib id 'item-00000' stands twice"):
        sample(PARAMS, [CALIB[0], CALIB[0]], EVAL, tokenizer())


@pytest.mark.parametrize(("tokens", "tag"), [(1, "len:1-1"), (31, "len:16-31"), (32, "len:32-63")])
def test_length_bands_are_powers_of_two(tokens: int, tag: str) -> None:
    assert length_tag(tokens) == tag


def test_the_card_says_what_was_used() -> None:
    sampled = sample(PARAMS, CALIB, EVAL, tokenizer())
    card = data_card(Data(), {"kind": "demo"}, "Apache-2.0", sampled)
    assert card["counts"]["calib_asked"] == card["counts"]["calib_used"] == 50
    assert sum(card["histogram"]["calibration"].values()) == 50
    assert sum(card["histogram"]["evaluation"].values()) == 40
    assert card["leakage"]["overlaps"] == []
