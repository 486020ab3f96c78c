"""Whether the promoted folder is the one that ``dvc.lock`` names, asked of DVC itself; and who may promote now."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import IntegrityError, PromotionError
from pipeline.registry.git import git

STAGE = "promoted"


@dataclass(frozen=True)
class Locked:
    """What ``dvc.lock`` names: ``listing`` is DVC's directory object, ``objects`` each file's MD5 by its path."""

    listing: str
    objects: dict[str, str]


@contextlib.contextmanager
def one_at_a_time(root: Path) -> Iterator[None]:
    """One command at a time changes the registry from this clone. The kernel drops the lock of a killed process."""
    from filelock import FileLock, Timeout

    place = Path(git(root, "rev-parse", "--path-format=absolute", "--git-common-dir")) / "enginegate.lock"
    try:
        with FileLock(place, timeout=0):
            yield
    except Timeout as error:
        raise PromotionError(
            f"another command is changing the registry from this clone ({place} is locked)", "wait until it is done"
        ) from error


def check_lock(root: Path, folder: Path) -> Locked:
    """Checks ``folder`` against ``dvc.lock`` and the cache; returns what is there.

    Raises PromotionError when the stage was never run, IntegrityError when the folder's content is not that of
    ``dvc.lock``.
    """
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    try:
        with Repo(str(root)) as repo:
            out = _find_out(repo, root / folder)
            if not out.hash_info:
                raise PromotionError(f"dvc.lock does not name {folder}", "run `dvc repro` first")
            for state in out.status().values():
                _refuse(folder, state)
            tree = out.get_obj()
            objects = {"/".join(key): oid.value for key, _, oid in tree}
            return Locked(out.hash_info.value, objects)
    except DvcException as error:
        raise PromotionError(f"dvc: {error}", "`dvc doctor` and `dvc status` say more") from error


def _find_out(repo: Any, path: Path) -> Any:
    for out in repo.index.outs:
        if Path(out.fs_path) == path.resolve():
            return out
    raise PromotionError(
        f"no stage of dvc.yaml has the output {path.name}", "take the stage `promoted` from enginegate's dvc.yaml"
    )


def _refuse(folder: Path, state: str) -> None:
    if state == "not in cache":
        raise PromotionError(f"{folder} is not in DVC's cache", f"dvc commit {STAGE}, then commit dvc.lock")
    raise IntegrityError(
        f"{folder}: its content is not what dvc.lock names ({state})",
        f"`dvc checkout {STAGE}` brings back what was promoted; `dvc repro` promotes by verdict",
    )
