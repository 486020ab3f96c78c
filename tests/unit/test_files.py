"""Files are whole or absent."""

from __future__ import annotations

import errno
import hashlib
from pathlib import Path

import pytest

from pipeline.errors import InputError, StorageError
from pipeline.files import (
    atomic_file,
    atomic_folder,
    canonical_json,
    digest_tree,
    read_json,
    read_jsonl,
    write_json,
    write_jsonl,
)


def test_canonical_json_sorts_and_refuses_nan() -> None:
    assert canonical_json({"b": 1, "a": "ñ"}) == '{"a":"ñ","b":1}'.encode()
    with pytest.raises(ValueError, match="Out of range"):
        canonical_json(float("nan"))


def test_a_failed_write_leaves_the_old_file_and_no_debris(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"old": 1})
    with pytest.raises(RuntimeError, match="half way"), atomic_file(path) as part:
        part.write_text("{")
        raise RuntimeError("half way")
    assert read_json(path) == {"old": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.json"]


def test_a_failed_folder_keeps_the_old_one(tmp_path: Path) -> None:
    folder = tmp_path / "engine"
    with atomic_folder(folder) as part:
        (part / "a").write_text("old")
    with pytest.raises(KeyboardInterrupt), atomic_folder(folder) as part:
        (part / "b").write_text("new")
        raise KeyboardInterrupt
    assert digest_tree(folder) == {"a": "sha256:" + hashlib.sha256(b"old").hexdigest()}
    assert [entry.name for entry in tmp_path.iterdir()] == ["engine"]
    with atomic_folder(folder) as part:
        (part / "b").write_text("new")
    assert list(digest_tree(folder)) == ["b"]


def test_what_a_kill_between_the_renames_left_is_put_right(tmp_path: Path) -> None:
    """The old folder is moved aside, the new one is complete but not yet in its place; a neighbour's is left alone."""
    folder = tmp_path / "engine"
    for name, content in ((".engine.abcd1234.old", "old"), (".engine.abcd1234.part", "new"), (".engine.v2.x.part", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_text(content)
    with pytest.raises(RuntimeError, match="again"), atomic_folder(folder):
        raise RuntimeError("again")
    assert (folder / "a").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".engine.v2.x.part", "engine"]


def test_a_full_disk_is_a_storage_error_that_names_the_target(tmp_path: Path) -> None:
    message = r"out.json: no space left .* nothing was half-written"
    with pytest.raises(StorageError, match=message), atomic_file(tmp_path / "out.json"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_broken_json_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write_jsonl(path, [{"a": 1}])
    with path.open("a") as file:
        file.write("{broken\n")
    with pytest.raises(InputError, match=r"rows.jsonl:2: not JSON"):
        read_jsonl(path)
    with pytest.raises(InputError, match="no such file"):
        read_json(tmp_path / "absent.json")
