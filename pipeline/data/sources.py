"""Rows from any source: the demo corpus, a local file, or a hub data set, through Hugging Face ``datasets``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import DataError
from pipeline.params import DEMO, Data
from pipeline.sources import LOCAL_DATA


@dataclass(frozen=True)
class Row:
    """One pair. ``group`` keeps related rows together (a document, a component)."""

    id: str
    source: str
    target: str
    group: str | None


def load_rows(data: Data, split: str) -> list[Row]:
    """The rows of the set ``calib`` or ``eval``. Raises DataError naming the column, row and next step."""
    rows = _raw_rows(data, split)
    if not rows:
        raise DataError(f"data: the {split} set is empty", "check data.source and the splits in params.yaml")
    columns = {"source": data.columns.source, "target": data.columns.target}
    for meaning, column in columns.items():
        if column not in rows[0]:
            raise DataError(
                f"data: the {split} set has no column {column!r} (it has: {', '.join(map(str, rows[0]))})",
                f"set data.columns.{meaning} in params.yaml",
            )
    return [_row(place, raw, data, split) for place, raw in enumerate(rows)]


def _row(place: int, raw: dict[str, Any], data: Data, split: str) -> Row:
    texts = []
    for column in (data.columns.source, data.columns.target):
        value = raw[column]
        if not isinstance(value, str) or not value.strip():
            raise DataError(
                f"data: {split} row {place}: column {column!r} is {value!r}, not text", "repair or remove this row"
            )
        texts.append(value)
    optional = [raw.get(name) if name else None for name in (data.columns.id, data.columns.group)]
    identity, group = (None if value is None else str(value) for value in optional)
    return Row(f"{split}-{place:07d}" if identity is None else identity, texts[0], texts[1], group)


def _raw_rows(data: Data, split: str) -> list[dict[str, Any]]:
    if data.source == DEMO:
        from pipeline.data.demo import load_demo

        return load_demo(split)
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    name = {"calib": data.calib_split, "eval": data.eval_split}[split]
    file = {"calib": data.calib_file, "eval": data.eval_file}[split]
    try:
        if file is not None:
            loader = LOCAL_DATA.get(Path(file).suffix, data.source)
            return list(load_dataset(loader, data_files=file, split="train"))
        if Path(data.source).suffix in LOCAL_DATA:
            whole = load_dataset(LOCAL_DATA[Path(data.source).suffix], data_files=data.source, split="train")
            return [row for row in whole if _side(row, data) == split]
        return list(load_dataset(data.source, data.name, split=name, revision=data.revision))
    except (DatasetsError, ValueError, OSError) as error:
        raise DataError(
            f"data: the {split} set does not load: {error}", "check the section data of params.yaml"
        ) from error


def _side(row: dict[str, Any], data: Data) -> str:
    """One file for both sets: a row's group (or else its source text) decides its side, half and half."""
    import hashlib

    group = row.get(data.columns.group) if data.columns.group else None
    key = str(row.get(data.columns.source)) if group is None else str(group)
    return "eval" if hashlib.sha256(key.encode()).digest()[0] % 2 else "calib"
