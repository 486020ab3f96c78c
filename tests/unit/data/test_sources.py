"""Rows from local files and hub data sets, streamed, with the mistakes that people make."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.data.promptlog import PromptLog
from pipeline.data.sources import Dataset, open_rows
from pipeline.errors import DataError
from pipeline.params import Columns, Data
from tests.tiny import rows, write_rows


def _files(tmp_path: Path, **changes: Any) -> Data:
    return Data(source="json", calib_file=str(tmp_path / "c.jsonl"), eval_file=str(tmp_path / "e.jsonl"), **changes)


def test_two_jsonl_files(tmp_path: Path) -> None:
    write_rows(tmp_path / "c.jsonl", rows(5, 1))
    write_rows(tmp_path / "e.jsonl", rows(3, 2))
    found = open_rows(_files(tmp_path), "calib")
    assert [row.id for row in found] == [row["id"] for row in rows(5, 1)]
    assert [row.id for row in found] == [row["id"] for row in rows(5, 1)]  # a source can be read again
    assert len(list(open_rows(_files(tmp_path), "eval"))) == 3


def test_csv_and_parquet_with_a_column_mapping(tmp_path: Path) -> None:
    import pandas

    frame = pandas.DataFrame({"en": ["one two", "three four"], "es": ["uno dos", "tres cuatro"]})
    frame.to_csv(tmp_path / "c.csv", index=False)
    frame.iloc[::-1].to_parquet(tmp_path / "e.parquet")
    data = Data(
        source="csv",
        calib_file=str(tmp_path / "c.csv"),
        eval_file=str(tmp_path / "e.parquet"),
        columns=Columns(source="en", target="es", id=None, group=None),
    )
    calib, evaluation = list(open_rows(data, "calib")), list(open_rows(data, "eval"))
    assert [(row.source, row.target, row.group) for row in calib] == [
        ("one two", "uno dos", None),
        ("three four", "tres cuatro", None),
    ]
    # Without an id column the id comes from the content, so it does not depend on the order of the rows.
    assert [row.id.removeprefix("calib") for row in calib] == [
        row.id.removeprefix("eval") for row in reversed(evaluation)
    ]


def test_one_file_is_split_by_group(tmp_path: Path) -> None:
    write_rows(tmp_path / "all.jsonl", rows(200, 1))
    data = Data(source=str(tmp_path / "all.jsonl"))
    sides = [{row.group for row in open_rows(data, split)} for split in ("calib", "eval")]
    assert sides[0] & sides[1] == set()
    assert sides[0] | sides[1] == {f"g{place}" for place in range(20)}


def test_a_log_for_calibration_leaves_the_whole_file_for_evaluation(tmp_path: Path) -> None:
    write_rows(tmp_path / "all.jsonl", rows(200, 1))
    (tmp_path / "log.jsonl").write_text(json.dumps({"prompt": "x"}) + "\n")
    data = Data(source=str(tmp_path / "all.jsonl"), calib_log=str(tmp_path / "log.jsonl"))
    assert isinstance(open_rows(data, "calib"), PromptLog)
    assert len(list(open_rows(data, "eval"))) == 200


def test_a_file_for_one_set_leaves_the_whole_source_for_the_other(tmp_path: Path) -> None:
    write_rows(tmp_path / "all.jsonl", rows(200, 1))
    write_rows(tmp_path / "e.jsonl", rows(3, 2))
    data = Data(source=str(tmp_path / "all.jsonl"), eval_file=str(tmp_path / "e.jsonl"))
    assert [len(list(open_rows(data, split))) for split in ("calib", "eval")] == [200, 3]


def test_a_corpus_without_answers_needs_no_target(tmp_path: Path) -> None:
    write_rows(tmp_path / "c.jsonl", [{"source": "only text", "id": "7"}])
    assert [(row.id, row.source, row.target) for row in open_rows(_files(tmp_path), "calib", answers=False)] == [
        ("7", "only text", "")
    ]
    with pytest.raises(DataError, match="no column 'target'") as caught:
        list(open_rows(_files(tmp_path), "calib"))
    assert "calib.answers: false" in caught.value.next_step


def test_a_hub_data_set_is_streamed_at_its_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import huggingface_hub.constants

    asked: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def load(*words: Any, **settings: Any) -> list[dict[str, Any]]:
        asked.append((words, settings))
        return rows(2, 1)

    monkeypatch.setattr(datasets, "load_dataset", load)
    data = Data(source="org/name", name="en-es", revision="0" * 40, calib_split="train", eval_split="test")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    assert len(list(open_rows(data, "calib"))) == 2
    assert asked[-1] == (("org/name", "en-es"), {"split": "train", "revision": "0" * 40, "streaming": True})
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # then only the cache is there
    list(open_rows(data, "eval"))
    assert asked[-1] == (("org/name", "en-es"), {"split": "test", "revision": "0" * 40, "streaming": False})


def test_reading_can_be_limited_and_says_so(tmp_path: Path) -> None:
    write_rows(tmp_path / "c.jsonl", rows(5, 1))
    found = Dataset(_files(tmp_path, max_rows=3), "calib")
    assert len(list(found)) == 3
    assert not found.complete
    found = Dataset(_files(tmp_path, max_rows=5), "calib")
    assert len(list(found)) == 5
    assert found.complete


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"source": "a b", "id": "1"}\n', "the calib set has no column 'target' \\(it has: source, id\\)"),
        ('{"source": "a b", "target": null}\n', "calib row 0: column 'target' is None, not text"),
        ('{"source": "a b", "target": 3}\n', "calib row 0: column 'target' is 3, not text"),
        ('{"source": "a b", "target": "x"}\n{"source": " ", "target": "x"}\n', "calib row 1: column 'source' is ' '"),
        ('{"source": "a b", "target": "x"}\n{"source": "c d"}\n', "calib row 1: column 'target' is None, not text"),
        ("{broken\n", "the calib set does not load"),
        ("", "the calib set is empty"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "c.jsonl").write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        list(open_rows(_files(tmp_path), "calib"))
    assert caught.value.next_step


def test_a_broken_row_far_down_is_our_error_too(tmp_path: Path) -> None:
    """The stream has begun by then."""
    write_rows(tmp_path / "c.jsonl", rows(1000, 1))
    with (tmp_path / "c.jsonl").open("a") as file:
        file.write('{"source": "cut of\n')
    with pytest.raises(DataError, match="the calib set does not load"):
        list(open_rows(_files(tmp_path), "calib"))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the calib set does not load.*c.jsonl"):
        list(open_rows(_files(tmp_path), "calib"))
