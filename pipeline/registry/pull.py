"""From a reference to an engine folder that may be loaded: resolved, checked, fetched, checked again.

The signature is checked before the first byte is fetched (it covers the digests), each byte as it arrives. The folder
gets its name when everything holds. What was fetched before a kill or a broken connection stays beside it and is
gone on from, in the middle of a file too.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.engines.manifest import FILE
from pipeline.errors import InputError, IntegrityError, RegistryError, SignatureError, UsageError
from pipeline.files import storage_errors
from pipeline.registry import git as _git
from pipeline.registry.fit import Machine, this_machine, warnings
from pipeline.registry.reference import Build, builds, fitting_build, parse_reference
from pipeline.registry.registration import read_companions
from pipeline.registry.signing import Verifier
from pipeline.registry.steps import progress
from pipeline.registry.store import BLOCK, JOBS, Object, Source, cache_store, copy_and_hash, remote_store
from pipeline.registry.tags import read_registry
from pipeline.registry.verify import Verified, check_companions, objects_of, verify_folder

PULLED = Path("engines/pulled")


@dataclass(frozen=True)
class Pulled:
    """An engine that is here and whole. ``fetched`` is False when it was here before."""

    artifact: str
    version: str
    digest: str
    folder: Path
    signature: str
    fetched: bool
    warnings: tuple[str, ...]


def pull(
    root: Path,
    text: str,
    *,
    output: Path | None = None,
    remote: str | None = None,
    verifier: Verifier | None = None,
    require_signature: bool = False,
    machine: Machine | None = None,
    offline: bool = False,
    oci: str | None = None,
) -> Pulled:
    """Brings the build that ``text`` names and ``machine`` (None: this one) can run.

    ``offline`` believes the tags of this clone instead of fetching; ``oci`` names an OCI registry to read from instead
    of the DVC remote. Raises UsageError for a reference that names
    nothing, UnfitError, IntegrityError, SignatureError and RegistryError.
    """
    require_signature = require_signature or _policy_requires(root)
    if require_signature and verifier is None:
        raise SignatureError(f"{text}: a signature is required and nobody to trust is named", "pull --key KEY.pub")
    build, found = resolve(root, text, machine or this_machine(), offline=offline)
    version, companions = build.version, read_companions(root, build.version)
    checked = check_companions(version.name, build.manifest, companions, verifier)
    folder = output or root / PULLED / version.name
    fetched = not _is_here(folder, checked, companions, verifier)
    if fetched:
        _fetch(build, companions, folder, _sources(root, build, remote, oci))
    return Pulled(
        artifact=version.artifact,
        version=version.version,
        digest=version.digest,
        folder=folder,
        signature=checked.signature,
        fetched=fetched,
        warnings=tuple(found),
    )


def resolve(root: Path, text: str, machine: Machine, *, offline: bool = False) -> tuple[Build, list[str]]:
    """The build for ``machine``, and what may be different there."""
    reference = parse_reference(text)
    _git.require_full_clone(root)
    shared = _git.git_remote(root)
    if shared and not offline:
        try:
            _git.fetch_tags(root, shared)
        except RegistryError as error:
            raise RegistryError(
                error.message, f"{error.next_step}; --offline takes the versions that this clone knows"
            ) from error
    build = fitting_build(builds(root, read_registry(root), reference), reference, machine)
    return build, warnings(build.manifest, machine)


def _policy_requires(root: Path) -> bool:
    """Whether ``policy.yaml`` asks for signatures. The rest of it is not for whoever pulls, so it is not loaded."""
    from ruamel.yaml import YAML

    policy = root / "policy.yaml"
    return policy.exists() and bool((YAML(typ="safe").load(policy) or {}).get("require_signature"))


def _is_here(folder: Path, wanted: Verified, companions: Mapping[str, bytes], verifier: Verifier | None) -> bool:
    """Whether the folder holds this version, every byte of it."""
    if not folder.exists():
        return False
    if not (folder / FILE).is_file():
        raise UsageError(f"{folder}: is there and is no engine", "name another folder: --output DIR")
    try:
        found = verify_folder(folder, verifier)
    except (InputError, IntegrityError) as error:
        print(f"warning: {error.message}; it is pulled again", flush=True)
        return False
    return found.digest == wanted.digest and (folder / FILE).read_bytes() == companions[FILE]


def _fetch(build: Build, companions: Mapping[str, bytes], folder: Path, sources: Mapping[str, Source]) -> None:
    from filelock import FileLock, Timeout

    part = folder.with_name(f".{folder.name}.part")
    old = folder.with_name(f".{folder.name}.old")
    with storage_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(folder.with_name(f".{folder.name}.lock"), timeout=0):
                part.mkdir(exist_ok=True)
                _fetch_files(build, part, sources)
                for name, content in companions.items():
                    (part / name).write_bytes(content)
                _leave_only(part, {*build.manifest["files"], *companions})
                shutil.rmtree(old, ignore_errors=True)
                if folder.exists():
                    folder.replace(old)
                part.replace(folder)
                shutil.rmtree(old, ignore_errors=True)
        except Timeout as error:
            raise RegistryError(f"{folder}: another process pulls it now", "wait until it is done") from error


def _leave_only(part: Path, names: set[str]) -> None:
    """Removes files that an earlier pull of another version left in the folder."""
    for path in part.rglob("*"):
        if path.is_file() and path.relative_to(part).as_posix() not in names:
            path.unlink()


def _sources(root: Path, build: Build, remote: str | None, oci: str | None) -> dict[str, Source]:
    """Where each file is read from: what was named, else DVC's cache where it has the file, else the default remote."""
    objects, digests = objects_of(build.manifest), build.manifest["files"]
    if oci is not None:
        from pipeline.registry.oci import OciSource, open_repository

        repository = open_repository(oci, build.version.artifact)
        return dict.fromkeys(objects, OciSource(repository, {objects[name].md5: digests[name] for name in objects}))
    cache, store = cache_store(root), remote_store(root, remote)
    sources: dict[str, Source] = {}
    for name, one in objects.items():
        near = cache if remote is None and cache.size(one.md5) == one.size else store
        if near is None:
            raise RegistryError(f"{name}: not in DVC's cache, and there is no DVC remote", "dvc remote add --default")
        sources[name] = near
    return sources


def _fetch_files(build: Build, part: Path, sources: Mapping[str, Source]) -> None:
    objects, digests = objects_of(build.manifest), build.manifest["files"]
    total = sum(one.size for one in objects.values())
    with progress(total, build.version.name) as advance, ThreadPoolExecutor(JOBS) as pool:
        jobs = [
            pool.submit(fetch_file, sources[name], one, part / name, digests[name], advance)
            for name, one in sorted(objects.items(), key=lambda row: -row[1].size)  # the long ones first
        ]
        for job in jobs:
            job.result()


def fetch_file(
    store: Source, one: Object, file: Path, digest: str, advance: Callable[[int], object] = lambda _: None
) -> None:
    """Brings one object, from where an earlier call stopped. Raises IntegrityError for other bytes than ``digest``."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    while True:
        hashed = hashlib.sha256()
        start = _hash_start(file, one.size, hashed, advance)
        if start < one.size or one.size == 0:
            copy_and_hash(store, one.md5, file, hashed, advance)
        if f"sha256:{hashed.hexdigest()}" == digest:
            return
        os.truncate(file, 0)
        if not start:
            raise IntegrityError(
                f"{store.label}: {file.name} ({one.md5}) has other bytes than were promoted",
                "do not use this version; `enginegate verify` and the people who promoted it say more",
            )
        advance(-one.size)  # what an earlier call left was damaged: once more, from the start


def _hash_start(file: Path, size: int, hashed: Any, advance: Callable[[int], object]) -> int:
    """Hashes what is there already; a file that is too long starts anew. Returns how much is kept."""
    if file.stat().st_size > size:
        os.truncate(file, 0)
    with file.open("rb") as there:
        while block := there.read(BLOCK):
            hashed.update(block)
            advance(len(block))
        return there.tell()
