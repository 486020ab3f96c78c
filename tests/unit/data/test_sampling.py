"""Both sets: the count asked is the count used, disjoint, seeded, of the right lengths, nothing cut."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.data import draw
from pipeline.data.card import data_card
from pipeline.data.promptlog import PromptLog
from pipeline.data.rows import Row
from pipeline.data.sampling import Sampled, length_tag, read_calibration, sample, write_calibration
from pipeline.errors import DataError
from pipeline.params import Calib, Data, Engine, Eval, Params, Prompt
from tests.tiny import PROMPT, WORDS, rows, tokenizer

PARAMS = Params(
    prompt=Prompt(template="plain", user=PROMPT),
    calib=Calib(samples=50, strata=1, max_tokens=64, batch_tokens=256),
    eval=Eval(samples=40, max_new_tokens=16),
    engine=Engine(max_tokens=64),
)


def _rows(count: int, seed: int, first_id: int = 0) -> list[Row]:
    return [Row(row["id"], row["source"], row["target"], row["group"]) for row in rows(count, seed, first_id)]


def _long(name: str, words: int, seed: int = 0) -> Row:
    order = random.Random(f"{name}/{seed}")
    return Row(name, " ".join(f"a{order.randrange(WORDS)}" for _ in range(words)), "b1", None)


def _calib(params: Params, **changes: Any) -> Params:
    return replace(params, calib=replace(params.calib, **changes))


def _drawn(sampled: Sampled) -> list[tuple[str, list[int]]]:
    return [(one.id, one.token_ids.tolist()) for one in sampled.calibration]


CALIB, EVAL = _rows(100, 1), _rows(100, 2, first_id=1000)
USABLE = sample(_calib(PARAMS, samples=1), CALIB, EVAL, tokenizer())


def test_the_counts_asked_are_the_counts_used() -> None:
    sampled = sample(PARAMS, CALIB, EVAL, tokenizer())
    assert len(sampled.calibration) == sampled.counts["calib_used"] == sampled.counts["calib_asked"] == 50
    assert len(sampled.evaluation) == sampled.counts["eval_used"] == sampled.counts["eval_asked"] == 40
    assert sampled.overlaps == {}
    words = tokenizer()
    first = sampled.calibration[0]
    source = next(row for row in CALIB if row.id == first.id)
    prompt = PROMPT.replace("{source}", source.source)
    assert first.token_ids.tolist() == words(prompt + " " + source.target)["input_ids"]
    assert first.prompt_tokens == len(words(prompt)["input_ids"])


def test_without_answers_only_prompts_are_calibrated_on() -> None:
    sampled = sample(_calib(PARAMS, answers=False), CALIB, EVAL, tokenizer())
    assert all(len(one.token_ids) == one.prompt_tokens for one in sampled.calibration)


@pytest.mark.parametrize("strata", [1, 5])
@pytest.mark.parametrize("block", [1, 7, 5000])
def test_the_draw_depends_on_neither_order_nor_batches(
    monkeypatch: pytest.MonkeyPatch, block: int, strata: int
) -> None:
    params = _calib(PARAMS, strata=strata)
    expected = sample(params, CALIB, EVAL, tokenizer())
    monkeypatch.setattr(draw, "BLOCK", block)
    shuffled = random.Random(block).sample(CALIB, len(CALIB))
    found = sample(params, shuffled, EVAL[::-1], tokenizer())
    assert _drawn(found) == _drawn(expected)
    assert found.evaluation == expected.evaluation
    assert found.counts == expected.counts
    other = sample(replace(params, seed=18), CALIB, EVAL, tokenizer())
    assert _drawn(other) != _drawn(expected)


def test_an_evaluation_item_in_the_calibration_rows_is_left_out_and_counted() -> None:
    """faults.md, row "too-good score": one evaluation item in the calibration set in other clothes."""
    params = replace(_calib(PARAMS, samples=100), eval=replace(PARAMS.eval, samples=100))
    clean = sample(params, [*CALIB, *_rows(20, 7, 3000)], EVAL, tokenizer()).counts["calib_left_out_overlap"]
    leak = Row("leak", EVAL[0].source.upper() + " .", "b1", None)
    sampled = sample(params, [leak, *CALIB, *_rows(20, 7, 3000)], EVAL, tokenizer())
    assert "leak" not in {one.id for one in sampled.calibration}
    assert sampled.counts["calib_left_out_overlap"] == clean + 1
    assert sampled.overlaps == {}


def test_long_samples_are_left_out_whole_and_counted() -> None:
    """faults.md, rows "long samples cut" and "silent truncation": one token more than the limit is left out on
    both sides, the limit itself is used whole, and both are counted."""
    # Prompt: "translate", the words, "=>"; the calibration sample has one word of answer in addition.
    fits, too_long = _long("fits", 61), _long("too-long", 62)
    item, long_item = _long("fits-eval", 46), _long("too-long-eval", 47)  # 64 tokens less 16 to answer
    params = replace(_calib(PARAMS, samples=1), eval=replace(PARAMS.eval, samples=1))
    sampled = sample(params, [fits, too_long], [item, long_item], tokenizer())
    assert [(one.id, len(one.token_ids)) for one in sampled.calibration] == [("fits", 64)]
    assert [(one.id, len(one.prompt_token_ids)) for one in sampled.evaluation] == [("fits-eval", 48)]
    with pytest.raises(DataError, match="only 1 can be used: 2 different rows, left out: 1 too long"):
        sample(_calib(params, samples=2), [fits, too_long], [item, long_item], tokenizer())
    with pytest.raises(DataError, match="only 1 can be used: 2 considered, 1 left out too long"):
        sample(replace(params, eval=replace(params.eval, samples=2)), [fits], [item, long_item], tokenizer())


def test_an_outlier_late_in_a_long_sample_is_kept() -> None:
    """faults.md, row "long samples cut": the outlier only in the last sample, after position 512."""
    word = tokenizer().convert_tokens_to_ids("a39")
    late = Row("late", " ".join(["a1", *(f"a{place % 30}" for place in range(530)), "a39"]), "b1", None)
    others = [_long(f"l{place}", 20) for place in range(30)]
    params = replace(
        _calib(PARAMS, samples=31, max_tokens=600, batch_tokens=600), eval=replace(PARAMS.eval, samples=10)
    )
    sampled = sample(params, [*others, late], EVAL, tokenizer())
    kept = next(one for one in sampled.calibration if one.id == "late")
    assert kept.token_ids.tolist().index(word) > 512
    assert len({one.id for one in sampled.calibration}) == 31  # distinct samples, none used twice


def test_exact_twins_count_once() -> None:
    twin = Row("twin", CALIB[0].source.upper() + "  ", "b1", None)
    sampled = sample(_calib(PARAMS, samples=90), [*CALIB, twin, twin], EVAL, tokenizer())
    used = [one.id for one in sampled.calibration]
    assert len(set(used) & {"twin", CALIB[0].id}) <= 1
    everything = sample(_calib(PARAMS, samples=96), [*CALIB, twin, twin], EVAL[:40], tokenizer())
    assert everything.counts["calib_left_out_duplicate"] == 2


def test_near_twins_count_once() -> None:
    one = _long("one", 40)
    near = Row("near", one.source + " a1", "b1", None)  # 38 of 39 n-grams
    far = Row("far", " ".join(one.source.split()[:20] + _long("x", 20).source.split()), "b1", None)
    params = replace(_calib(PARAMS, samples=2), eval=replace(PARAMS.eval, samples=1))
    sampled = sample(params, [one, near, far], EVAL, tokenizer())
    names = {one.id for one in sampled.calibration}
    assert len(names & {"one", "near"}) == 1
    assert "far" in names
    with pytest.raises(DataError, match="only 2 can be used: 3 different rows, left out: 1 near duplicate"):
        sample(_calib(params, samples=3), [one, near, far], EVAL, tokenizer())


def test_too_few_rows_are_refused_with_the_number_that_works() -> None:
    with pytest.raises(DataError, match=r"asks for 1000 calibration samples, but only (\d+) can be used") as caught:
        sample(_calib(PARAMS, samples=1000), CALIB, EVAL, tokenizer())
    usable = int(str(caught.value).split("only ")[1].split()[0])
    assert f"at most {usable}" in caught.value.next_step
    assert len(sample(_calib(PARAMS, samples=usable), CALIB, EVAL, tokenizer()).calibration) == usable
    with pytest.raises(DataError, match="asks for 40 evaluation items, but only 0 .*100 left out too many words"):
        sample(replace(PARAMS, eval=replace(PARAMS.eval, max_words=1)), CALIB, EVAL, tokenizer())


def test_repeated_ids_are_refused() -> None:
    other = replace(CALIB[1], id=CALIB[0].id)
    with pytest.raises(DataError, match="calib id 'item-00000' stands twice"):
        sample(_calib(PARAMS, samples=2), [CALIB[0], other], EVAL, tokenizer())
    with pytest.raises(DataError, match="eval id 'item-00000' stands twice"):
        sample(replace(PARAMS, eval=replace(PARAMS.eval, samples=2)), EVAL, [CALIB[0], other], tokenizer())


# -- length strata ----------------------------------------------------------------------------------------------


def _skewed(count: int, prefix: str, seed: int, mean: float) -> list[Row]:
    order = random.Random(seed)
    return [
        _long(f"{prefix}{place}", max(4, min(45, round(order.expovariate(1 / mean)))), seed) for place in range(count)
    ]


def test_strata_give_the_calibration_set_the_lengths_of_the_evaluation_set() -> None:
    from scipy.stats import ks_2samp, wasserstein_distance

    short, long = _skewed(2500, "c", 1, mean=9), _skewed(300, "e", 2, mean=15)
    params = replace(_calib(PARAMS, samples=100, strata=20), eval=replace(PARAMS.eval, samples=200))
    sampled = sample(params, short, long, tokenizer())
    assert len(sampled.calibration) == 100
    assert sampled.drawn.moved == 0
    wanted = [len(item.prompt_token_ids) for item in sampled.evaluation]
    got = [one.prompt_tokens for one in sampled.calibration]
    distances = sampled.distances()
    assert distances["after"]["ks"] == pytest.approx(ks_2samp(got, wanted).statistic, abs=1e-6)
    assert distances["after"]["wasserstein"] == pytest.approx(wasserstein_distance(got, wanted), abs=1e-4)
    assert distances["after"]["ks"] <= 1 / 20 + 1 / 100  # within a band, and by rounding the quotas
    assert distances["before"]["ks"] > 0.25
    # A draw without bands is what `before` speaks of.
    plain = sample(_calib(params, strata=1), short, long, tokenizer())
    assert plain.distances()["after"] == distances["before"]


def test_a_band_that_runs_out_is_filled_from_the_nearest_and_counted() -> None:
    """Half of the evaluation set has 40 words, but only 5 rows of such a length can be had."""
    evaluation = [_long(f"e{place}", 10 + 30 * (place % 2)) for place in range(40)]
    calib = [_long(f"s{place}", 10) for place in range(60)] + [_long(f"m{place}", 30) for place in range(30)]
    calib += [_long(f"l{place}", 40) for place in range(5)]
    sampled = sample(_calib(PARAMS, strata=4), calib, evaluation, tokenizer())
    kinds = Counter(one.id[0] for one in sampled.calibration)
    assert kinds == {"s": 25, "l": 5, "m": 20}  # 30 words are nearer to 40 than 10 are
    assert sampled.drawn.moved == sampled.counts["calib_other_lengths"] == 20
    assert (sampled.drawn.wanted, sampled.drawn.used) == ([25, 0, 25], [25, 0, 5])


def test_the_search_for_a_rare_length_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw, "SEARCH", 2)
    evaluation = [_long(f"e{place}", 10 + 30 * (place % 2)) for place in range(40)]
    calib = [_long(f"s{place}", 10) for place in range(1000)]
    sampled = sample(_calib(PARAMS, strata=4), calib, evaluation, tokenizer())
    assert len(sampled.calibration) == 50
    assert sampled.drawn.moved == 25
    assert sampled.counts["calib_considered"] == 100
    # But the count that was asked is reached first, however long it takes.
    rare = [_long(f"x{place}", 62) for place in range(900)] + calib[:60]
    sampled = sample(_calib(PARAMS, strata=4), rare, evaluation, tokenizer())
    assert len(sampled.calibration) == 50
    assert sampled.counts["calib_considered"] > 500


# -- prompt logs ------------------------------------------------------------------------------------------------


def _log(path: Path, entries: list[Any], **settings: Any) -> PromptLog:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return PromptLog(str(path), **settings)


def _chat(row: Row, answer: bool = True) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "messages": [{"role": "system", "content": "translate"}, {"role": "user", "content": row.source}]
    }
    if answer:
        entry["choices"] = [{"message": {"role": "assistant", "content": row.target}}]
    return entry


TURNS = "{% for m in messages %}{{ m.content }} </s> {% endfor %}{% if add_generation_prompt %}=> {% endif %}"


def test_calibration_on_a_prompt_log(tmp_path: Path) -> None:
    words = tokenizer()
    words.chat_template = TURNS.replace("{{ m.content }}", "{{ '=> ' if m.role == 'assistant' }}{{ m.content }}")
    log = _log(tmp_path / "log.jsonl", [_chat(row) for row in CALIB])
    sampled = sample(PARAMS, log, EVAL, words)
    assert len(sampled.calibration) == 50
    by_line = {f"{tmp_path}/log.jsonl:{place}": row for place, row in enumerate(CALIB, start=1)}
    for one in sampled.calibration:
        row = by_line[one.id]
        text = f"translate </s> {row.source} </s> => {row.target} </s>"
        assert one.token_ids.tolist() == words(text, add_special_tokens=False)["input_ids"]
        assert one.prompt_tokens == len(row.source.split()) + 4


@pytest.mark.parametrize("form", ["chat", "turn", "prompt", "rendered", "ids"])
def test_an_evaluation_item_in_a_prompt_log_is_found_in_every_form(tmp_path: Path, form: str) -> None:
    """faults.md, row "too-good score": in the user's message, in a turn, or as a rendered prompt, text or ids."""
    words = tokenizer()
    words.chat_template = TURNS
    params = replace(_calib(PARAMS, samples=20), eval=replace(PARAMS.eval, samples=100))
    source = EVAL[3].source.upper().replace("A", "a")
    prompt = PROMPT.replace("{source}", source)
    leak = {
        "chat": {"messages": [{"role": "user", "content": source}]},
        "turn": {"messages": [{"role": role, "content": text} for role, text in (("user", source), ("user", "b1 b2"))]},
        "prompt": {"prompt": source},
        "rendered": {"prompt": prompt},
        "ids": {"prompt": words(prompt)["input_ids"]},
    }[form]
    clean = _log(tmp_path / "clean.jsonl", [_chat(row) for row in CALIB[:60]])
    before = sample(_calib(params, samples=1), clean, EVAL, words)
    assert before.counts["calib_left_out_overlap"] <= 1
    log = _log(tmp_path / "log.jsonl", [leak])
    with pytest.raises(DataError, match="left out: 1 overlap"):
        sample(_calib(params, samples=1), log, EVAL, words)


def test_redaction_happens_before_anything_is_kept_and_twins_that_it_makes_go(tmp_path: Path) -> None:
    entries = [{"prompt": f"a{place % 30} a{place % 7} mail x{place}@y.org a{place % 11}"} for place in range(60)]
    twins = [{"prompt": f"a39 a39 a39 a39 mail z{place}@y.org"} for place in range(10)]
    log = _log(tmp_path / "log.jsonl", entries + twins)
    params = replace(_calib(PARAMS, samples=61), data=Data(redact=("email",)))
    sampled = sample(params, log, EVAL, tokenizer())
    assert "y.org" not in "".join(one.source for one in sampled.calibration)
    assert all("name@example.com" in one.source for one in sampled.calibration)
    assert sampled.counts["calib_left_out_duplicate"] + sampled.counts["calib_left_out_near_duplicate"] == 9
    assert sampled.counts["calib_redacted"] == sampled.counts["calib_considered"] == 70


def test_requests_that_the_template_refuses_are_counted_and_refused_beyond_the_share(tmp_path: Path) -> None:
    words = tokenizer()
    words.chat_template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TURNS
    entries = [{"messages": [{"role": "user", "content": row.source}]} for row in CALIB] + [_chat(CALIB[0])]
    log = _log(tmp_path / "log.jsonl", entries)
    params = replace(_calib(PARAMS, samples=90), data=Data(log_bad_lines=0.5))
    sampled = sample(params, log, EVAL, words)
    assert sampled.drawn.unusable == {"the chat template refuses it: no system": 1}
    assert sampled.drawn.first_unusable == [f"{tmp_path}/log.jsonl:101: the chat template refuses it: no system"]
    with pytest.raises(DataError, match="1 of .* logged requests cannot be rendered, first .*log.jsonl:101"):
        sample(replace(params, data=Data(log_bad_lines=0.0)), log, EVAL, words)


def test_doubled_bos_in_the_calibration_rows(tmp_path: Path) -> None:
    """faults.md, row "doubled BOS": a row of a data set stops the run; a line of a log is counted and left out."""
    words = tokenizer()
    words.chat_template = "<s> {{ messages[0].content }}"
    params = replace(_calib(PARAMS, samples=20), prompt=Prompt(template="chat"), data=Data(log_bad_lines=0.5))
    with pytest.raises(DataError, match="two begin-of-sequence tokens \\(1\\): '<s> a1 a2'"):
        sample(params, [*CALIB, Row("x", "<s> a1 a2", "b1", None)], EVAL, words)
    log = _log(
        tmp_path / "log.jsonl", [{"messages": [{"role": "user", "content": "<s> a1"}]}, *map(_prompt, CALIB[:30])]
    )
    sampled = sample(_calib(params, samples=30), log, EVAL, words)
    assert sampled.drawn.unusable == {"the prompt starts with two begin-of-sequence tokens": 1}


def _prompt(row: Row) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": row.source}]}


def test_the_length_profile_of_a_production_log(tmp_path: Path) -> None:
    """Frequent prompts count as often as they came: three of four requests have 30 words, one has 6."""
    log = _log(
        tmp_path / "log.jsonl",
        [{"prompt": _long(f"p{place % 4}", 6 if place % 4 == 0 else 30).source} for place in range(40)],
    )
    # The prompt has two words more than its source.
    calib = [_long(f"c{place}", (3, 4, 10, 27, 28)[place % 5]) for place in range(500)]
    params = replace(_calib(PARAMS, samples=40, strata=5), data=Data(profile_log=str(tmp_path / "log.jsonl")))
    sampled = sample(params, calib, EVAL, tokenizer(), log)
    assert Counter(one.prompt_tokens for one in sampled.calibration) == {6: 10, 30: 30}
    assert sampled.distances()["after"]["ks"] == 0
    with pytest.raises(DataError, match="the log holds no request"):
        sample(params, calib, EVAL, tokenizer(), ())


# -- files and card ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "tag"), [(1, "len:1-1"), (31, "len:16-31"), (32, "len:32-63")])
def test_length_bands_are_powers_of_two(tokens: int, tag: str) -> None:
    assert length_tag(tokens) == tag


def test_what_is_written_can_be_read_and_holds_nothing_but_the_sample(tmp_path: Path) -> None:
    sampled = sample(PARAMS, CALIB, EVAL, tokenizer())
    write_calibration(tmp_path / "calib.jsonl", sampled.calibration)
    assert read_calibration(tmp_path / "calib.jsonl") == [one.token_ids.tolist() for one in sampled.calibration]
    first = json.loads((tmp_path / "calib.jsonl").read_text().splitlines()[0])
    assert first.keys() == {"id", "source", "prompt_tokens", "token_ids"}


def test_the_card_says_what_was_used(tmp_path: Path) -> None:
    params = replace(_calib(PARAMS, strata=5), data=Data(redact=("digits",), log_bad_lines=0.1))
    log = _log(tmp_path / "log.jsonl", [*(_chat(row) for row in CALIB), {"model": "none"}], bad_lines=0.1)
    sampled = sample(params, log, EVAL, tokenizer())
    card = data_card(
        params,
        {"kind": "files", "redact": {"digits": "built-in"}},
        "Apache-2.0",
        sampled,
        digests={"calibration": "sha256:0", "evaluation": "sha256:1"},
        calib_log=log,
        complete={"calibration": True, "evaluation": True},
    )
    assert card["counts"]["calib_asked"] == card["counts"]["calib_used"] == 50
    assert sum(card["histogram"]["calibration"].values()) == 50
    assert sum(card["histogram"]["evaluation"].values()) == 40
    assert card["tokens"]["calibration"] == sum(len(one.token_ids) for one in sampled.calibration)
    assert card["leakage"]["overlaps"] == []
    assert "3-grams" in card["leakage"]["rule"]
    assert card["log"] == {
        "lines": 101,
        "unusable_lines": {"neither messages nor prompt": 1},
        "unusable_requests": {},
        "first_unusable": [f"{tmp_path}/log.jsonl:101: neither messages nor prompt"],
    }
    assert card["redaction"] == {"redactors": {"digits": "built-in"}, "changed": 0, "dropped": 0}
    bands = card["lengths"]["bands"]
    assert sum(band["share"] for band in bands) == pytest.approx(1, abs=1e-5)
    assert sum(band["wanted"] for band in bands) == 50
    assert card["lengths"]["moved"] == 50 - sum(band["used"] for band in bands)
    assert json.loads(json.dumps(card)) == card
