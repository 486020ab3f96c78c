"""Frees what engines that were never registered occupy in DVC's cache or a DVC remote.

An object goes only if it belongs to an engine (an output under ``engines/``) of an earlier run, and nothing else
needs it: no registered version, no branch, no other tag, not the working tree, and no other kind of output of any run.
So the refused siblings of a registered engine go. `dvc gc` keeps whole commits or none, calibration data and all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.errors import IntegrityError, PromotionError
from pipeline.registry import git as _git
from pipeline.registry.git import git, read_blobs, subfolder
from pipeline.registry.lock import one_at_a_time
from pipeline.registry.promoted import PROMOTED
from pipeline.registry.store import Store, cache_store, remote_store
from pipeline.registry.tags import is_ours

ENGINES = "engines/"
_REFS = ("refs/heads", "refs/remotes", "refs/tags")


@dataclass(frozen=True)
class Out:
    """One output that some ``dvc.lock`` names; ``md5`` ends with ``.dir`` for a folder."""

    path: str
    md5: str
    seen: str  # the commit, or "not committed"

    @property
    def engine(self) -> bool:
        """Whether it is an engine."""
        return self.path.startswith(ENGINES)


@dataclass
class Garbage:
    """What can go from one store."""

    store: str
    engines: list[Out] = field(default_factory=list)
    objects: dict[str, int] = field(default_factory=dict)  # md5 -> bytes

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(self.objects.values())


def collect(root: Path, *, remote: str | None = None, cache: bool = True, delete: bool = False) -> list[Garbage]:
    """Finds, and with ``delete`` removes, what no version needs: from the cache, and from ``remote`` if it is named.

    Raises PromotionError in a shallow clone or while DVC is at work.
    """
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    _git.require_full_clone(root)
    with one_at_a_time(root):
        shared = _git.git_remote(root)
        if shared:
            _git.fetch_tags(root, shared)
            git(root, "fetch", "--quiet", shared)  # branches of others too
        near = cache_store(root)
        far = remote_store(root, remote) if remote else None
        stores = [store for store in (near if cache else None, far) if store is not None]
        try:
            with Repo(str(root)) as repo, repo.lock:  # not while a run writes engines
                listings = _Listings([near, *([far] if far else [])])
                needed, engines = _sort(root, listings)
                found = [_garbage(store, needed, engines, listings) for store in stores]
                if delete:
                    for store, garbage in zip(stores, found, strict=True):
                        # The listing of a folder goes last, so that a killed run finds the rest again.
                        for md5 in sorted(garbage.objects, key=lambda name: name.endswith(".dir")):
                            store.remove(md5)
        except DvcException as error:
            raise PromotionError(f"dvc: {error}", "wait until the other dvc command is done") from error
        return found


class _Listings:
    """The files of DVC's folder objects, read from the first store that has them."""

    def __init__(self, stores: list[Store]) -> None:
        self._stores = stores
        self._known: dict[str, list[str]] = {}

    def objects(self, md5: str) -> list[str]:
        """The object and, for a folder, those of its files."""
        if not md5.endswith(".dir"):
            return [md5]
        if md5 not in self._known:
            self._known[md5] = [md5, *(row["md5"] for row in self._read(md5))]
        return self._known[md5]

    def _read(self, md5: str) -> list[dict[str, str]]:
        for store in self._stores:
            if store.size(md5) is None:
                continue
            try:
                rows: list[dict[str, str]] = json.loads(store.read(md5))
            except ValueError as error:
                raise IntegrityError(f"{store.place(md5)}: not a listing of DVC: {error}", "remove it") from error
            return rows
        return []  # in neither store, so its files are unknown here and nothing of them is touched


def _sort(root: Path, listings: _Listings) -> tuple[set[str], list[Out]]:
    """The objects that something needs, and the engines of which nothing does."""
    kept, earlier = _kept_locks(root), _earlier_locks(root)
    needed = {md5 for out in kept for md5 in listings.objects(out.md5)}
    needed |= {md5 for out in earlier if not out.engine for md5 in listings.objects(out.md5)}
    listed = {out.md5 for out in kept}
    engines = {(out.path, out.md5): out for out in reversed(earlier) if out.engine and out.md5 not in listed}
    return needed, list(engines.values())


def _kept_locks(root: Path) -> list[Out]:
    """Outputs of the working tree and of every branch and tag; of a registered version, what was promoted."""
    refs = git(root, "for-each-ref", "--format=%(refname) %(objectname) %(*objectname)", *_REFS).splitlines()
    commits = {"HEAD": True}  # commit -> whether all of its outputs are kept
    for line in refs:
        name, *ids = line.split()
        registered = name.startswith("refs/tags/") and is_ours(name.removeprefix("refs/tags/"))
        commits[ids[-1]] = commits.get(ids[-1], False) or not registered
    place = subfolder(root)
    contents = read_blobs(root, [f"{commit}:{place}dvc.lock" for commit in commits])
    found = [
        out
        for content, whole in zip(contents, commits.values(), strict=True)
        for out in _outs(content)
        if whole or out.path == PROMOTED.as_posix()
    ]
    working = root / "dvc.lock"
    return [*found, *_outs(working.read_bytes() if working.exists() else None)]


def _earlier_locks(root: Path) -> list[Out]:
    """Outputs of every commit that changed ``dvc.lock``, and of runs that were never committed (DVC's run cache)."""
    commits = git(root, "log", "--all", "--format=%H", "--", "dvc.lock").split()
    place = subfolder(root)
    contents = read_blobs(root, [f"{commit}:{place}dvc.lock" for commit in commits])
    found = [out for commit, content in zip(commits, contents, strict=True) for out in _outs(content, commit)]
    runs = Path(cache_store(root).path) / "runs"
    for file in sorted(runs.glob("*/*/*")):
        if file.is_file():
            found += list(_outs(file.read_bytes()))
    return found


def _outs(content: bytes | None, seen: str = "not committed") -> Iterator[Out]:
    """The cached outputs of a ``dvc.lock``, or of one entry of the run cache."""
    from ruamel.yaml import YAML

    plain: dict[str, Any] = (YAML(typ="safe").load(content.decode()) if content else None) or {}
    for stage in [plain, *(plain.get("stages") or {}).values()]:
        for out in stage.get("outs") or []:
            if out.get("md5"):
                yield Out(out["path"], out["md5"], seen)


def _garbage(store: Store, needed: set[str], engines: list[Out], listings: _Listings) -> Garbage:
    garbage = Garbage(store.label)
    for engine in engines:
        free = {md5 for md5 in listings.objects(engine.md5) if md5 not in needed}
        sizes = {md5: size for md5 in free - garbage.objects.keys() if (size := store.size(md5)) is not None}
        if sizes:
            garbage.engines.append(engine)
            garbage.objects |= sizes
    return garbage
