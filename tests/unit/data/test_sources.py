"""Rows from local files, with the mistakes that people make."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.data.sources import load_rows
from pipeline.errors import DataError
from pipeline.params import Columns, Data
from tests.tiny import rows, write_rows


def test_two_jsonl_files(tmp_path: Path) -> None:
    write_rows(tmp_path / "c.jsonl", rows(5, 1))
    write_rows(tmp_path / "e.jsonl", rows(3, 2))
    data = Data(source="json", calib_file=str(tmp_path / "c.jsonl"), eval_file=str(tmp_path / "e.jsonl"))
    assert [row.id for row in load_rows(data, "calib")] == [row["id"] for row in rows(5, 1)]
    assert len(load_rows(data, "eval")) == 3


def test_csv_and_parquet_with_a_column_mapping(tmp_path: Path) -> None:
    import pandas

    frame = pandas.DataFrame({"en": ["one two", "three four"], "es": ["uno dos", "tres cuatro"]})
    frame.to_csv(tmp_path / "c.csv", index=False)
    frame.to_parquet(tmp_path / "e.parquet")
    data = Data(
        source="csv",
        calib_file=str(tmp_path / "c.csv"),
        eval_file=str(tmp_path / "e.parquet"),
        columns=Columns(source="en", target="es", id=None, group=None),
    )
    assert [(row.id, row.source, row.target) for row in load_rows(data, "calib")] == [
        ("calib-0000000", "one two", "uno dos"),
        ("calib-0000001", "three four", "tres cuatro"),
    ]
    assert load_rows(data, "eval")[0].id == "eval-0000000"


def test_one_file_is_split_by_group(tmp_path: Path) -> None:
    write_rows(tmp_path / "all.jsonl", rows(200, 1))
    data = Data(source=str(tmp_path / "all.jsonl"))
    sides = [{row.group for row in load_rows(data, split)} for split in ("calib", "eval")]
    assert sides[0] & sides[1] == set()
    assert sides[0] | sides[1] == {f"g{place}" for place in range(20)}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"source": "a b", "id": "1"}\n', "the calib set has no column 'target' \\(it has: source, id\\)"),
        ('{"source": "a b", "target": null}\n', "calib row 0: column 'target' is None, not text"),
        ('{"source": "a b", "target": "x"}\n{"source": " ", "target": "x"}\n', "calib row 1: column 'source' is ' '"),
        ("{broken\n", "the calib set does not load"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "c.jsonl").write_text(content)
    data = Data(source="json", calib_file=str(tmp_path / "c.jsonl"), eval_file="e.jsonl")
    with pytest.raises(DataError, match=message):
        load_rows(data, "calib")
