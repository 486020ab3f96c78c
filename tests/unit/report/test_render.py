from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from pipeline.files import read_json
from pipeline.report.collect import collect
from pipeline.report.render import page, summary, write_report
from pipeline.report.text import signed
from tests.unit.report.conftest import PARAMS
from tests.unit.report.synthetic import make_items, write_run

EVIL = "<script>alert('x')</script> & \"quoted\" | `code` </style>"
VOID = {"meta", "br", "link", "img", "input", "hr"}


class Page(HTMLParser):
    """Collects tags and text, and checks that tags nest."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.links: list[str] = []
        self.words = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.words += data


def parsed(html: str) -> Page:
    found = Page()
    found.feed(html)
    assert found.open == []
    return found


@pytest.fixture(scope="session")
def data(run: Path) -> dict[str, Any]:
    return collect(run, PARAMS)


def test_delta_nll_is_shown_where_references_were_scored(data: dict[str, Any]) -> None:
    assert "nats a token" not in page(data)
    first, *others = data["recipes"]
    fidelity = first["fidelity"] | {"delta_nll": {"value": 0.01234, "lower": -0.002, "upper": 0.03}}
    words = parsed(page(data | {"recipes": [first | {"fidelity": fidelity}, *others]})).words
    assert f"{first['name']}: negative log-likelihood of the reference answers" in words
    assert "+0.0123 nats a token (-0.0020 to +0.0300)" in words


def test_the_data_card_is_on_the_page(data: dict[str, Any]) -> None:
    words = " ".join(parsed(page(data)).words.split())
    assert "On average 0.4 tokens from the evaluation set's lengths" in words
    assert "a draw without length bands: 7.5 tokens (25.0 %)" in words
    assert "3 samples stand in for lengths that ran out" in words
    assert "logs/*.jsonl, 12 345 lines; unusable: 2 not JSON" in words
    assert "email: 17 texts changed, 1 dropped" in words
    assert "the source of the calibration set (data.max_rows)" in words
    assert "7 duplicate (calib)" in words


def test_every_number_of_the_verdict_is_on_the_page(data: dict[str, Any]) -> None:
    words = parsed(page(data)).words
    for recipe in data["recipes"]:
        for row in recipe["metrics"]:
            assert f"{row['baseline']:.2f}" in words
            assert f"{row['candidate']:.2f}" in words
            assert signed(row["difference"]) in words
            assert f"[{signed(row['lower'])}, {signed(row['upper'])}]" in words
        for reason in recipe["reasons"]:
            assert reason in words
    assert "fewer than the default of 10\N{NARROW NO-BREAK SPACE}000" in words
    assert "float32 on the CPU" in words
    assert "Not a benchmark" in words
    assert data["policy"]["digest"] in words


def test_a_card_without_log_and_redaction_is_usual(data: dict[str, Any]) -> None:
    """The keys are only there when a prompt log or a redactor was used."""
    card = {key: value for key, value in data["data"].items() if key not in ("log", "redaction")}
    words = parsed(page(data | {"data": card})).words
    assert "Prompt log" not in words
    assert "Redaction" not in words


def test_the_page_stands_alone(data: dict[str, Any]) -> None:
    html = page(data)
    assert all(link.startswith("#") for link in parsed(html).links)
    assert not re.search(r"https?://|@import|url\(|<script", html)


def test_the_same_run_gives_the_same_bytes(run: Path, data: dict[str, Any]) -> None:
    assert page(collect(run, PARAMS)) == page(data)


def test_model_text_is_escaped(tmp_path: Path) -> None:
    items = make_items(80)
    texts = [f"{EVIL} {place}" for place in range(len(items))]
    write_run(tmp_path, count=80, int8_sq=texts, repeat=texts)
    found = collect(tmp_path, PARAMS)
    found["headline"] = found["recipes"][0]["reasons"][0] = found["recipes"][0]["description"] = EVIL
    found["recipes"][0]["metrics"][0]["signature"] = found["arms"][0]["dtype"] = EVIL
    found["recipes"][0]["metrics"][0]["slice"] = found["compared"]["model"] = EVIL
    html = page(found)
    assert "script" not in parsed(html).seen
    assert "<script" not in html
    assert "alert" in html
    markdown = summary(found)
    assert "<script" not in markdown.replace("\\<script", "")
    table = [line for line in markdown.splitlines() if line.startswith("|")]
    widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table}
    assert widths == {6, 9, 11}  # three tables; no pipe of a cell ends it


def test_the_summary_names_verdicts_and_numbers(data: dict[str, Any]) -> None:
    text = summary(data)
    assert text.startswith("## int8\\_mixed is promoted, int8\\_sq is refused.")
    assert "**PROMOTE**" in text
    assert "**REJECT**" in text
    assert "not a benchmark" in text


@pytest.mark.parametrize("word", ["INVALID", "INCONCLUSIVE"])
def test_without_metrics_and_split(run: Path, word: str) -> None:
    """A verdict that failed a structural check has no metric at all."""
    found = collect(run, PARAMS)
    for recipe in found["recipes"]:
        recipe |= {"verdict": word, "metrics": [], "fidelity": {}, "attribution": {}, "ledger": [], "changes": None}
        recipe["validity"][0] |= {"ok": False, "detail": "no answers from: repeat", "items": ["a/1", "<b>"]}
        recipe |= {"census": None, "probe": None}
    found |= {"repeat": None}
    found["compared"]["baseline"] = None
    words = parsed(page(found)).words
    assert "no answers from: repeat" in words
    assert "23 of 24" in words or "checks hold" in words
    assert f"**{word}**" in summary(found)


def test_three_files(tmp_path: Path, data: dict[str, Any]) -> None:
    write_report(data, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("fleet.csv", "index.html", "report.json", "report.md"),
    ]
    assert read_json(tmp_path / "report.json")["headline"] == data["headline"]
