"""Whether the promoted folder is the one that ``dvc.lock`` names, asked of DVC itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.errors import IntegrityError, PromotionError

STAGE = "promoted"


def check_lock(root: Path, folder: Path) -> list[str]:
    """Checks ``folder`` against ``dvc.lock`` and the remote; returns warnings.

    Raises PromotionError when the stage was never run or its output is not pushed, IntegrityError when the
    folder's content is not that of ``dvc.lock``.
    """
    from dvc.exceptions import DvcException  # type: ignore[import-untyped]
    from dvc.repo import Repo  # type: ignore[import-untyped]

    try:
        with Repo(str(root)) as repo:
            out = _find_out(repo, root / folder)
            if not out.hash_info:
                raise PromotionError(f"dvc.lock does not name {folder}", "run `dvc repro` first")
            for state in out.status().values():
                _refuse(folder, state)
            return _unpushed(repo, folder)
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


def _unpushed(repo: Any, folder: Path) -> list[str]:
    """A registered engine that nobody can pull is worth nothing: where there is a remote, it must be there."""
    if not repo.config["core"].get("remote"):
        return ["no default DVC remote: only this machine has the engine (dvc remote add --default NAME URL)"]
    if repo.status(targets=[STAGE], cloud=True):
        raise PromotionError(f"{folder} is not on the DVC remote yet", f"dvc push {STAGE}")
    return []
