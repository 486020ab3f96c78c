"""The steps of one registration, in this order: the bytes first, the names last.

A kill between any two leaves at most bytes that nobody points at and git objects without a name; the same command
goes on from there.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.engines.manifest import FILE, PROVENANCE_FILE, SBOM_FILE, SIGNATURE_FILE, check_manifest
from pipeline.errors import IntegrityError, PromotionError
from pipeline.files import canonical_json, digest_file
from pipeline.registry import git as _git
from pipeline.registry.lock import Locked
from pipeline.registry.promoted import PROMOTED
from pipeline.registry.registration import provenance_of, read_companions, read_manifests, write_commit
from pipeline.registry.signing import Signer
from pipeline.registry.store import Object, Store, cache_store
from pipeline.registry.tags import Registry, Version, make_tag, publish, read_registry


@dataclass
class Plan:
    """One engine on its way into the registry."""

    root: Path
    recipe: str
    manifest: dict[str, Any]
    artifact: str
    version: str
    stage: str | None  # None: no stage was asked for, or it holds this version already
    existing: Version | None
    registry: Registry
    locked: Locked
    store: Store | None
    remote: str | None
    signer: Signer | None
    oci: str | None = None  # an OCI registry that gets a copy
    tags: dict[str, str] = field(default_factory=dict)  # name -> object, what is published at once
    commit: str | None = None

    @property
    def folder(self) -> Path:
        """The engine, relative to the project."""
        return PROMOTED / self.recipe

    def objects(self) -> dict[str, Object]:
        """Every file of the engine's folder as the store will know it, by its path in the folder."""
        prefix = f"{self.recipe}/"
        files = {name.removeprefix(prefix): md5 for name, md5 in self.locked.objects.items() if name.startswith(prefix)}
        return {
            name: Object(md5, (self.root / self.folder / name).stat().st_size) for name, md5 in sorted(files.items())
        }


def upload(plan: Plan) -> None:
    """Pushes what the store lacks, DVC's listing of the folder last."""
    if plan.store is None:
        return
    objects = plan.objects()
    lacking = plan.store.missing(objects)
    with progress(sum(objects[name].size for name in lacking), f"{plan.recipe}: pushing") as advance:
        for name in lacking:
            plan.store.put(plan.root / plan.folder / name, objects[name].md5)
            advance(objects[name].size)
    listing = _listing(plan)
    if plan.store.size(plan.locked.listing) != listing.stat().st_size:
        plan.store.put(listing, plan.locked.listing)


def confirm(plan: Plan) -> None:
    """Reads everything back from the store and compares it with what was judged. Raises IntegrityError."""
    if plan.store is None:
        return
    objects = plan.objects()
    wanted = plan.manifest["files"] | {FILE: digest_file(plan.root / plan.folder / FILE)}
    with progress(sum(one.size for one in objects.values()), f"{plan.recipe}: verifying") as advance:
        for name, one in objects.items():
            _compare(plan.store, name, one.md5, plan.store.digest(one.md5, advance), wanted[name])
    listing = plan.locked.listing
    _compare(plan.store, "DVC's listing", listing, plan.store.digest(listing), digest_file(_listing(plan)))


def _compare(store: Store, name: str, md5: str, found: str, wanted: str) -> None:
    if found != wanted:
        raise IntegrityError(
            f"{store.label}: {name} comes back with other bytes than were judged",
            f"remove {store.place(md5)} and run the command again; nothing was registered",
        )


def _listing(plan: Plan) -> Path:
    cache = cache_store(plan.root)
    return Path(cache.place(plan.locked.listing))


def record(plan: Plan) -> None:
    """Writes the registration's commit and the tag objects. They have no name yet, so nobody sees them."""
    after = plan.registry.newest.get(plan.artifact, 0)
    tag = plan.registry.version_tag(plan.artifact, plan.version)
    if plan.existing is None:
        message = _message(plan)
        plan.commit = write_commit(plan.root, *_completed(plan), message)
        plan.tags[tag] = make_tag(plan.root, tag, plan.commit, message, after)
    else:
        plan.commit = plan.existing.commit
        if plan.remote is not None:
            plan.tags[tag] = plan.existing.tag_object  # perhaps never shared; no news where it was
    if plan.stage:
        name = plan.registry.stage_tag(plan.artifact, plan.stage)
        before = plan.registry.in_stage(plan.artifact, plan.stage)
        message = f"{plan.stage}: {before or 'empty'} -> {plan.version}"
        plan.tags[name] = make_tag(plan.root, name, plan.commit, message, after + 1)


def share(plan: Plan) -> None:
    """The moment of registration: version and stage get their names, at once and only if nobody else took them."""
    publish(plan.root, plan.remote, plan.tags)


def adopt(plan: Plan) -> None:
    """Brings what the git remote accepted into this clone."""
    if plan.remote is not None:
        _git.set_tags(plan.root, plan.tags)


def mirror(plan: Plan) -> None:
    """Copies what is registered to the OCI registry that was named. A copy that lacks something is completed."""
    if plan.oci is None:
        return
    from pipeline.registry.oci import check_copy, copy_engine, open_repository

    version = read_registry(plan.root).find(plan.artifact, plan.version)
    if version is None:
        raise PromotionError(f"{plan.artifact}@{plan.version} is not registered", "run the command again")
    manifest = read_manifests(plan.root, [version])[version.name]
    repository = open_repository(plan.oci, plan.artifact)
    copy_engine(repository, manifest, plan.root / plan.folder, read_companions(plan.root, version))
    check_copy(repository, manifest)


STEPS: tuple[Callable[[Plan], None], ...] = (upload, confirm, record, share, adopt, mirror)
AGAIN: tuple[Callable[[Plan], None], ...] = (upload, mirror)  # for what is registered already: its bytes, made sure of


def _completed(plan: Plan) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The manifest as registered, and the files that stand beside it."""
    from pipeline.registry.statements import bill_of_materials, provenance

    objects = plan.objects()
    manifest = plan.manifest | {
        "provenance": provenance_of(plan.root),
        "registration": {
            "artifact": plan.artifact,
            "version": plan.version,
            "path": plan.folder.as_posix(),
            "objects": {name: vars(objects[name]) for name in plan.manifest["files"]},
        },
    }
    check_manifest(manifest, f"{plan.artifact}@{plan.version}")
    companions = {
        FILE: canonical_json(manifest) + b"\n",
        PROVENANCE_FILE: canonical_json(provenance(manifest)) + b"\n",
        SBOM_FILE: canonical_json(bill_of_materials(manifest)) + b"\n",
    }
    if plan.signer:
        digests = manifest["files"] | digests_of(companions)
        companions[SIGNATURE_FILE] = plan.signer.sign(f"{plan.artifact}@{plan.version}", digests)
    return manifest, companions


def digests_of(companions: Mapping[str, bytes]) -> dict[str, str]:
    """``sha256:<hex>`` of the files beside the engine, the signature left out."""
    return {
        name: f"sha256:{hashlib.sha256(content).hexdigest()}"
        for name, content in companions.items()
        if name != SIGNATURE_FILE
    }


def _message(plan: Plan) -> str:
    """The tag's message: what a reader of `git show` wants to know."""
    gate = plan.manifest["gate"]
    lines = [f"{plan.recipe} for {plan.manifest['backend']}: {gate['verdict']}", ""]
    lines += [f"- {reason}" for reason in gate["reasons"]]
    return "\n".join(
        [*lines, "", f"policy-digest: {gate['policy_digest']}", f"engine-digest: {plan.manifest['digest']}", ""]
    )


@contextlib.contextmanager
def progress(total: int, what: str) -> Iterator[Callable[[int], object]]:
    """A bar over ``total`` bytes, on a terminal only; yields what moves it on."""
    from tqdm import tqdm

    with tqdm(total=total, unit="B", unit_scale=True, desc=what, disable=None, leave=False) as bar:
        yield bar.update
