"""The census on the page: rows, reasons, the KV plot, and an old census that has none of it."""

from __future__ import annotations

from typing import Any

from pipeline.report import census as section
from pipeline.report.render import _environment

CENSUS: dict[str, Any] = {
    "layers": [
        {"layer": "model.layers.0.q_proj", "weight_amax": 0.51234, "input_amax": 3.0, "channel_ratio": 140.0},
        {"layer": "model.layers.1.q_proj", "weight_amax": 0.5},
    ],
    "skipped": [
        {"layer": "lm_head", "why": "ModelOpt leaves *lm_head* alone"},
        {"layer": "model.layers.0.down_proj", "why": "excluded by *down_proj"},
        {"layer": "model.layers.1.down_proj", "why": "excluded by *down_proj"},
    ],
    "kv": [{"layer": "a", "k_amax": 9.0, "v_amax": 2.0}, {"layer": "b", "k_amax": 11.0, "v_amax": None}],
    "outliers": [{"layer": "a.q_proj", "what": "largest input channel against the median", "times": 140.0}],
    "calibration": {
        "samples": 256, "tokens": 11546, "batches": 3, "budget": 4096, "batching": "equal lengths", "why": "softcap",
        "out_of_memory": [{"batch": 0, "tokens": 4000, "budget": 2048}],
    },
    "processes": 2,
    "device": "cuda",
}  # fmt: skip


def test_rows_hold_what_a_layer_has() -> None:
    first, second = section.layer_rows(CENSUS)
    assert (first["weight_amax"], first["input_amax"], first["channel_ratio"]) == ("0.5123", "3", "140")
    assert second["input_amax"] == second["pre_quant_scale_max"] == ""


def test_reasons_are_grouped_the_most_first() -> None:
    assert section.left_out(CENSUS) == [
        ("excluded by *down_proj", ["model.layers.0.down_proj", "model.layers.1.down_proj"]),
        ("ModelOpt leaves *lm_head* alone", ["lm_head"]),
    ]
    assert section.left_out({"skipped": ["lm_head"]}) == [("left out", ["lm_head"])]


def test_the_sentence_says_what_happened() -> None:
    said = section.conduct(CENSUS)
    assert "256 samples, 11546 tokens in 3 batches of at most 4096, samples of one length each (softcap)" in said
    assert "2 process(es) on cuda; out of memory 1 time(s), down to 2048 tokens." in said


def test_the_kv_plot_has_a_dot_for_each_scale() -> None:
    plot = section.kv_plot(CENSUS)
    assert plot is not None
    assert plot.count("<circle") == 3


def test_the_page_part_draws_a_full_and_an_old_census() -> None:
    template = _environment().get_template("census.html.j2")
    page = template.render(recipe={"name": "own", "census": CENSUS})
    assert "largest input channel against the median, 140 times" in page
    assert "2 excluded by *down_proj" in page
    old = template.render(recipe={"name": "own", "census": {"layers": [], "skipped": ["lm_head"]}})
    assert "1 left out" in old
    assert "Far from others" not in old
