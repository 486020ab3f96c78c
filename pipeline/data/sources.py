"""Rows from any source, streamed: the demo corpus, a local file, a hub data set (all through ``datasets``), a log."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pipeline.data.promptlog import PromptLog
from pipeline.data.rows import Row
from pipeline.errors import DataError
from pipeline.params import DEMO, Data
from pipeline.sources import LOCAL_DATA


def open_rows(data: Data, split: str, *, answers: bool = True) -> Dataset | PromptLog:
    """The rows of the set ``calib`` or ``eval``, to be iterated as often as needed; nothing is read yet.

    Without ``answers`` the column of the target is not needed.
    """
    if split == "calib" and data.calib_log is not None:
        return PromptLog(data.calib_log, bad_lines=data.log_bad_lines, max_rows=data.max_rows)
    return Dataset(data, split, answers=answers)


class Dataset:
    """The rows of a data set. ``complete`` says that ``data.max_rows`` did not end the last iteration.

    Iterating raises DataError naming the column, the row and the next step.
    """

    def __init__(self, data: Data, split: str, *, answers: bool = True) -> None:
        self.data, self.split, self.complete = data, split, True
        self.columns = {"source": data.columns.source} | ({"target": data.columns.target} if answers else {})

    def __iter__(self) -> Iterator[Row]:
        self.complete = True
        for place, raw in enumerate(_checked(_raw_rows(self.data, self.split), self.split)):
            if place == self.data.max_rows:
                self.complete = False
                return
            if place == 0:
                self._check_columns(raw)
            yield self._row(place, raw)

    def _check_columns(self, raw: dict[str, Any]) -> None:
        for meaning, column in self.columns.items():
            if column not in raw:
                raise DataError(
                    f"data: the {self.split} set has no column {column!r} (it has: {', '.join(map(str, raw))})",
                    f"set data.columns.{meaning} in params.yaml"
                    + (", or calib.answers: false" if (meaning, self.split) == ("target", "calib") else ""),
                )

    def _row(self, place: int, raw: dict[str, Any]) -> Row:
        texts = []
        for column in self.columns.values():
            value = raw.get(column)
            if not isinstance(value, str) or not value.strip():
                raise DataError(
                    f"data: {self.split} row {place}: column {column!r} is {value!r}, not text",
                    "repair or remove this row",
                )
            texts.append(value)
        optional = [raw.get(name) if name else None for name in (self.data.columns.id, self.data.columns.group)]
        identity, group = (None if value is None else str(value) for value in optional)
        if identity is None:  # of the content, so that it does not depend on the order of the rows
            identity = f"{self.split}-{hashlib.blake2b(repr(texts).encode(), digest_size=8).hexdigest()}"
        return Row(identity, texts[0], texts[1] if len(texts) == 2 else "", group)


def _raw_rows(data: Data, split: str) -> Iterable[dict[str, Any]]:
    file = {"calib": data.calib_file, "eval": data.eval_file}[split]
    if file is None and data.source == DEMO:
        from pipeline.data.demo import load_demo

        return load_demo(split)
    from datasets import load_dataset
    from huggingface_hub.constants import HF_HUB_OFFLINE

    rows: Iterable[dict[str, Any]]
    with _errors(split):
        if file is not None:
            loader = LOCAL_DATA.get(Path(file).suffix, data.source)
            rows = load_dataset(loader, data_files=file, split="train", streaming=True)
        elif (suffix := Path(data.source).suffix) in LOCAL_DATA:
            rows = load_dataset(LOCAL_DATA[suffix], data_files=data.source, split="train", streaming=True)
            if not (data.calib_log or data.calib_file or data.eval_file):  # then both sets share the file
                rows = (row for row in rows if _side(row, data) == split)
        else:
            name = {"calib": data.calib_split, "eval": data.eval_split}[split]
            # Offline there is only the local cache, which cannot be streamed but is mapped, never loaded.
            stream = not HF_HUB_OFFLINE
            rows = load_dataset(data.source, data.name, split=name, revision=data.revision, streaming=stream)
    return rows


def _checked(rows: Iterable[dict[str, Any]], split: str) -> Iterator[dict[str, Any]]:
    """The rows; an error of the reader becomes ours, and so does a set without a row."""
    source = iter(rows)
    empty = True
    while True:
        with _errors(split):
            row = next(source, None)
        if row is None:
            break
        empty = False
        yield row
    if empty:
        raise DataError(f"data: the {split} set is empty", "check data.source and the splits in params.yaml")


@contextlib.contextmanager
def _errors(split: str) -> Iterator[None]:
    """Turns what ``datasets`` raises into a DataError that names the set."""
    from datasets.exceptions import DatasetsError
    from pyarrow import ArrowException

    try:
        yield
    except StopIteration as error:  # what `datasets` lets out for an empty file
        raise DataError(f"data: the {split} set is empty", "check data.source and the files in params.yaml") from error
    except (DatasetsError, ArrowException, ValueError, TypeError, OSError) as error:
        raise DataError(
            f"data: the {split} set does not load: {error}", "check the section data of params.yaml"
        ) from error


def _side(row: dict[str, Any], data: Data) -> str:
    """One file for both sets: a row's group (or else its source text) decides its side, half and half."""
    group = row.get(data.columns.group) if data.columns.group else None
    key = str(row.get(data.columns.source)) if group is None else str(group)
    return "eval" if hashlib.sha256(key.encode()).digest()[0] % 2 else "calib"
