"""The few questions that promotion asks git, through its command line."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from pipeline.errors import PromotionError


def git(root: Path, *arguments: str) -> str:
    """The output of a git command. Raises PromotionError with git's own message."""
    try:
        # The C locale: messages are shown to people who search for them, and compared nowhere.
        environment = os.environ | {"LC_ALL": "C"}
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, env=environment, check=False
        )
    except FileNotFoundError as error:
        raise PromotionError(
            "git is not installed", "install git: promotion writes a tag into your repository"
        ) from error
    if done.returncode != 0:
        raise PromotionError(
            f"git {arguments[0]}: {done.stderr.strip()}", "run the command in the project's root folder"
        )
    return done.stdout.strip()


def require_full_clone(root: Path) -> None:
    """Refuses a folder without commits and a shallow clone, where a version may silently be the wrong one."""
    try:
        shallow = git(root, "rev-parse", "--is-shallow-repository")
        git(root, "rev-parse", "--verify", "--quiet", "HEAD")
    except PromotionError as error:
        raise PromotionError(
            f"{root.resolve()}: no git repository with a commit",
            "git init && git add . && git commit: a version is a tag on a commit",
        ) from error
    if shallow == "true":
        raise PromotionError(
            "this is a shallow clone: it lacks the commits and tags that earlier versions stand on",
            "git fetch --unshallow --tags (in GitHub Actions: actions/checkout with fetch-depth: 0)",
        )


def require_committed(root: Path, names: tuple[str, ...]) -> None:
    """Refuses files that HEAD does not hold as they are in the working tree."""
    for name in names:
        tracked = git(root, "ls-files", "--", name)
        changed = git(root, "status", "--porcelain", "--untracked-files=all", "--", name)
        if not tracked or changed:
            state = "differs from HEAD" if tracked and not changed.startswith("A") else "is not committed"
            raise PromotionError(
                f"{name} {state}: the tag would stand on a commit that does not hold this engine",
                f"git add {' '.join(names)} && git commit -m 'Promote', then dvc push",
            )


def project_name(root: Path) -> str:
    """The name of the remote repository, or of the repository's folder, as GTO allows names."""
    try:
        url = git(root, "remote", "get-url", "origin")
    except PromotionError:
        url = git(root, "rev-parse", "--show-toplevel")  # no remote yet
    return artifact_name(re.split(r"[/:\\]", url.rstrip("/\\"))[-1].removesuffix(".git"))


def artifact_name(text: str) -> str:
    """``text`` in lower case with only what a GTO name may hold."""
    return re.sub(r"[^a-z0-9_-]+", "-", text.lower()).strip("-_") or "engine"
