"""Files that are whole or absent: atomic writes, canonical JSON, digests.

A reader never sees a half-written file or folder: everything is written under a temporary name beside
its target and renamed. JSON that is hashed is canonical (sorted keys, no spaces, UTF-8, no NaN).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pipeline.errors import InputError, StorageError

# Quotas and file-size limits are met like a full disk.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FULL_WORDS = "|".join(f"os error {number}|{os.strerror(number)}" for number in _FULL)


def canonical_json(value: Any) -> bytes:
    """``value`` as canonical JSON bytes. Raises ValueError for NaN and infinities."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def digest_json(value: Any) -> str:
    """``sha256:<hex>`` of the canonical JSON of ``value``."""
    return "sha256:" + hashlib.sha256(canonical_json(value)).hexdigest()


def digest_file(path: Path) -> str:
    """``sha256:<hex>`` of a file's bytes, read in blocks."""
    with path.open("rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()


def digest_tree(root: Path, exclude: Iterable[str] = ()) -> dict[str, str]:
    """Relative POSIX path -> digest for every file under ``root``, but those named in ``exclude``."""
    skip = set(exclude)
    files = sorted(path for path in root.rglob("*") if path.is_file())
    names = {path.relative_to(root).as_posix(): path for path in files}
    return {name: digest_file(path) for name, path in names.items() if name not in skip}


@contextlib.contextmanager
def storage_errors(target: Path) -> Iterator[None]:
    """Turns a full disk or a refused path into a StorageError that names ``target``."""
    try:
        yield
    except Exception as error:
        if _is_full(error):
            free = shutil.disk_usage(_existing_parent(target)).free / 2**30
            raise StorageError(
                f"{target}: no space left on the disk ({free:.1f} GiB free); nothing was half-written",
                "free some space (`dvc gc -w` drops unused cache) and run `dvc repro` again",
            ) from error
        if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            raise StorageError(f"{target}: {error.strerror}", "check the owner and the mount of this path") from error
        raise


def _is_full(error: BaseException | None) -> bool:
    """Whether a write failed for want of space. Native writers (safetensors, ONNX) only say so in words, and
    transformers and ModelOpt wrap what they met."""
    if error is None:
        return False
    if isinstance(error, OSError) and error.errno in _FULL:
        return True
    return bool(re.search(_FULL_WORDS, str(error))) or _is_full(error.__cause__)


def _existing_parent(path: Path) -> Path:
    for parent in (path.absolute(), *path.absolute().parents):
        if parent.exists():
            return parent
    raise AssertionError("the root folder always exists")


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside ``path``; renames it onto ``path`` when the block ends well."""
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
        os.close(handle)
        part = Path(name)
        try:
            yield part
            part.chmod(0o644)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


def clear_leftovers(path: Path) -> None:
    """Puts right what a killed ``atomic_folder(path)`` left beside ``path``: a folder that was moved aside goes back
    when nothing took its place, half copies go away. DVC lets one run at a time write an output."""
    # What mkdtemp puts in the middle holds no dot, so a neighbour named NAME.more is left alone.
    ours = re.compile(rf"\.{re.escape(path.name)}\.[^.]+\.(old|part)")
    for left in sorted(path.parent.iterdir()):
        match = ours.fullmatch(left.name)
        if match and match[1] == "old" and not path.exists():
            left.replace(path)
        elif match:
            shutil.rmtree(left)


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yields a temporary folder beside ``path``; it takes the place of ``path`` when the block ends well.

    A folder that stood there before is kept until the new one is complete.
    """
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        clear_leftovers(path)
        part = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent))
        old = part.with_suffix(".old")
        try:
            yield part
            part.chmod(0o755)
            if path.exists():
                path.replace(old)
            part.replace(path)
        finally:
            if old.exists() and not path.exists():
                old.replace(path)  # the second rename failed: put the old folder back
            shutil.rmtree(part, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)


def write_json(path: Path, value: Any) -> None:
    """Writes ``value`` as sorted, indented JSON, atomically."""
    with atomic_file(path) as part:
        text = json.dumps(value, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False)
        part.write_text(text + "\n", encoding="utf-8")


def read_json(path: Path) -> Any:
    """Reads JSON; a missing or broken file is an InputError that names it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file", "run `dvc repro` to make it") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not JSON: {error}", "delete it and run `dvc repro` again") from error


def write_jsonl(path: Path, rows: Iterable[Any]) -> None:
    """Writes one canonical JSON object a line, atomically."""
    with atomic_file(path) as part, part.open("wb") as file:
        for row in rows:
            file.write(canonical_json(row) + b"\n")


def read_jsonl(path: Path) -> list[Any]:
    """Reads JSON lines; a missing file or a broken line is an InputError that names file and line."""
    rows = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                try:
                    rows.append(json.loads(line))
                except json.JSONDecodeError as error:
                    raise InputError(f"{path}:{number}: not JSON: {error}", "repair or remove this line") from error
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file", "run `dvc repro` to make it") from error
    return rows
