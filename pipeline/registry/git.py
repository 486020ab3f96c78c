"""The few questions that the registry asks git, through its command line."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.errors import PromotionError, RegistryError


def git(root: Path, *arguments: str, stdin: str | bytes | None = None, **environment: str) -> str:
    """The output of a git command, stripped. Raises PromotionError with git's own message."""
    done = _run(root, arguments, stdin, environment)
    if done.returncode != 0:
        raise PromotionError(
            f"git {arguments[0]}: {done.stderr.decode(errors='replace').strip()}",
            "run the command in the project's root folder",
        )
    return done.stdout.decode().strip()


def _run(
    root: Path, arguments: Sequence[str], stdin: str | bytes | None = None, extra: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    # The C locale: messages are shown to people who search for them, and compared nowhere. No prompt: a command that
    # waits for a password in CI hangs.
    environment = os.environ | {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0"} | dict(extra or {})
    content = stdin.encode() if isinstance(stdin, str) else stdin
    try:
        return subprocess.run(
            ["git", "-C", str(root), *arguments], input=content, capture_output=True, env=environment, check=False
        )
    except FileNotFoundError as error:
        raise PromotionError(
            "git is not installed", "install git: a version is a tag in your git repository"
        ) from error


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
            "this is a shallow clone: it lacks the commits and tags that versions and stages stand on",
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
                f"{name} {state}: the version would stand on a commit that does not hold this engine",
                f"git add {' '.join(names)} && git commit -m 'Promote'",
            )


def project_name(root: Path) -> str:
    """The name of the remote repository, or of the repository's folder, as GTO allows names."""
    remote = git_remote(root)
    url = git(root, "remote", "get-url", remote) if remote else git(root, "rev-parse", "--show-toplevel")
    return artifact_name(re.split(r"[/:\\]", url.rstrip("/\\"))[-1].removesuffix(".git"))


def artifact_name(text: str) -> str:
    """``text`` in lower case with only what a GTO name may hold."""
    return re.sub(r"[^a-z0-9_-]+", "-", text.lower()).strip("-_") or "engine"


def git_remote(root: Path) -> str | None:
    """The git remote that versions are shared through: ``origin``, or the only one; None when there is none."""
    names = git(root, "remote").split()
    if "origin" in names:
        return "origin"
    if len(names) > 1:
        raise PromotionError(
            f"several git remotes and none is named origin: {', '.join(names)}", "git remote rename NAME origin"
        )
    return names[0] if names else None


def subfolder(root: Path) -> str:
    """Where the project lies in its repository: empty, or a path with a slash at its end."""
    return git(root, "rev-parse", "--show-prefix")


def fetch_tags(root: Path, remote: str) -> None:
    """Brings the remote's tags here. Raises RegistryError when it does not answer or a tag was moved there."""
    done = _run(root, ["fetch", "--quiet", "--tags", remote])
    if done.returncode == 0:
        return
    message = done.stderr.decode(errors="replace").strip()
    if "would clobber existing tag" in message:
        raise RegistryError(
            f"a tag of this clone is another one on {remote}: {message}",
            "somebody moved or re-made a version; find out who, then `git tag -d NAME` and fetch again",
        )
    raise RegistryError(f"git fetch {remote}: {message}", "check the connection and your access to the repository")


def remote_tags(root: Path, remote: str) -> dict[str, str]:
    """Tag name -> object id on the remote."""
    done = _run(root, ["ls-remote", "--tags", "--refs", remote])
    if done.returncode != 0:
        message = done.stderr.decode(errors="replace").strip()
        raise RegistryError(f"git ls-remote {remote}: {message}", "check the connection and your access")
    rows = [line.split("\t") for line in done.stdout.decode().splitlines()]
    return {name.removeprefix("refs/tags/"): value for value, name in rows}


def push_tags(root: Path, remote: str, tags: Mapping[str, str]) -> str:
    """Pushes tag objects under their names, all or none; returns git's complaint, empty when it went well.

    No name is forced: a tag that exists on the remote as another object makes the push fail.
    """
    refs = [f"{value}:refs/tags/{name}" for name, value in tags.items()]
    done = _run(root, ["push", "--quiet", "--atomic", "--no-verify", remote, *refs])
    if done.returncode == 0:
        return ""
    return done.stderr.decode(errors="replace").strip() or f"exit status {done.returncode}"


def create_tags(root: Path, tags: Mapping[str, str]) -> None:
    """Creates tags in this clone, all or none. Raises PromotionError when one exists."""
    lines = [f"create refs/tags/{name} {value}" for name, value in tags.items()]
    git(root, "update-ref", "--stdin", stdin="\n".join(["start", *lines, "prepare", "commit", ""]))


def set_tags(root: Path, tags: Mapping[str, str]) -> None:
    """Makes tags of this clone what the remote accepted."""
    git(root, "update-ref", "--stdin", stdin="".join(f"update refs/tags/{name} {tags[name]}\n" for name in tags))


def commit_with(root: Path, parent: str, files: Mapping[str, bytes], message: str) -> str:
    """A commit on ``parent`` with files added or replaced, on no branch; working tree and index stay as they are."""
    with tempfile.TemporaryDirectory() as scratch:
        index = str(Path(scratch) / "index")
        git(root, "read-tree", parent, GIT_INDEX_FILE=index)
        for name, content in files.items():
            blob = git(root, "hash-object", "-w", "--stdin", stdin=content)
            git(root, "update-index", "--add", "--cacheinfo", f"100644,{blob},{name}", GIT_INDEX_FILE=index)
        tree = git(root, "write-tree", GIT_INDEX_FILE=index)
    return git(root, "commit-tree", tree, "-p", parent, stdin=message)


def read_blobs(root: Path, names: Sequence[str]) -> list[bytes | None]:
    """The content of ``commit:path`` names, None for each that does not exist."""
    done = _run(root, ["cat-file", "--batch"], "".join(f"{name}\n" for name in names))
    if done.returncode != 0:
        raise RegistryError(f"git cat-file: {done.stderr.decode(errors='replace').strip()}", "git fsck")
    found: list[bytes | None] = []
    place, output = 0, done.stdout
    for _ in names:
        end = output.index(b"\n", place)
        header = output[place:end]
        if header.endswith(b" missing"):
            found.append(None)
            place = end + 1
        else:
            size = int(header.rsplit(b" ", 1)[1])
            found.append(output[end + 1 : end + 1 + size])
            place = end + 1 + size + 1
    return found
