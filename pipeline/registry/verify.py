"""Checks of an engine that is here, or in the store, against everything that is known about it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.engines.manifest import (
    COMPANIONS,
    FILE,
    PROVENANCE_FILE,
    SBOM_FILE,
    SIGNATURE_FILE,
    compare_files,
    read_manifest,
)
from pipeline.errors import IntegrityError
from pipeline.files import digest_tree
from pipeline.registry.promoted import check_gate
from pipeline.registry.reference import Build, one_build, parse_reference
from pipeline.registry.registration import read_companions
from pipeline.registry.signing import Verifier
from pipeline.registry.steps import digests_of, progress
from pipeline.registry.store import JOBS, Object, Store
from pipeline.registry.tags import read_registry


@dataclass(frozen=True)
class Verified:
    """What was checked and held. ``signature`` is ``verified``, ``not checked`` or ``none``."""

    name: str
    digest: str
    files: int
    verdict: str
    signature: str
    signed_by: str | None = None


def verify_folder(folder: Path, verifier: Verifier | None = None) -> Verified:
    """Reads every byte of an engine folder, built, promoted or pulled.

    Raises IntegrityError for a byte, a verdict or a companion that does not fit, SignatureError for a signature
    that does not hold or, with a ``verifier``, is not there.
    """
    manifest = read_manifest(folder)
    compare_files(folder, manifest, digest_tree(folder, exclude=COMPANIONS))
    if "gate" in manifest:
        check_gate(manifest, str(folder / FILE))
    companions = {name: (folder / name).read_bytes() for name in COMPANIONS if (folder / name).is_file()}
    return check_companions(str(folder), manifest, companions, verifier)


def check_companions(
    name: str, manifest: Mapping[str, Any], companions: Mapping[str, bytes], verifier: Verifier | None
) -> Verified:
    """Checks provenance, bill of materials and signature against a manifest whose files were checked."""
    if "registration" in manifest:
        _about_these_files(name, manifest, companions)
    signature = companions.get(SIGNATURE_FILE)
    signed_by = None
    if verifier is not None:
        signed_by = verifier.verify(name, manifest["files"] | digests_of(companions), signature)
    state = "verified" if signed_by else "not checked" if signature else "none"
    verdict = manifest.get("gate", {}).get("verdict", "none: it was not promoted")
    return Verified(name, manifest["digest"], len(manifest["files"]), verdict, state, signed_by)


def _about_these_files(name: str, manifest: Mapping[str, Any], companions: Mapping[str, bytes]) -> None:
    """Provenance and bill of materials must speak of these very files."""
    files = {file: digest.removeprefix("sha256:") for file, digest in manifest["files"].items()}
    again = "pull the engine again"
    for companion in (PROVENANCE_FILE, SBOM_FILE):
        if companion not in companions:
            raise IntegrityError(f"{name}: {companion} is missing", again)
        try:
            content = json.loads(companions[companion])
            told = _provenance_files(content) if companion == PROVENANCE_FILE else _sbom_files(content)
        except (ValueError, KeyError, TypeError) as error:
            raise IntegrityError(f"{name}: {companion} cannot be read: {error!r}", again) from error
        if told != files:
            raise IntegrityError(f"{name}: {companion} speaks of other files than the manifest", again)


def _provenance_files(statement: dict[str, Any]) -> dict[str, str]:
    return {subject["name"]: subject["digest"]["sha256"] for subject in statement["subject"]}


def _sbom_files(bom: dict[str, Any]) -> dict[str, str]:
    files = bom["metadata"]["component"]["components"]
    return {file["name"]: file["hashes"][0]["content"] for file in files}


def verify_registered(root: Path, text: str, store: Store, verifier: Verifier | None = None) -> Verified:
    """Reads every byte of a registered version from the store, keeping none of them."""
    build = one_build(root, read_registry(root), parse_reference(text))
    compare_stored(build, store)
    return check_companions(build.version.name, build.manifest, read_companions(root, build.version), verifier)


def objects_of(manifest: Mapping[str, Any]) -> dict[str, Object]:
    """The engine's files as the store knows them."""
    return {name: Object(**one) for name, one in manifest["registration"]["objects"].items()}


def compare_stored(build: Build, store: Store) -> None:
    """Raises IntegrityError naming the first file that the store has not, or has otherwise."""
    name, objects = build.version.name, objects_of(build.manifest)
    require_stored(build, store)
    with (
        progress(sum(one.size for one in objects.values()), f"{name}: reading") as advance,
        ThreadPoolExecutor(JOBS) as pool,
    ):
        found = dict(zip(objects, pool.map(lambda one: store.digest(one.md5, advance), objects.values()), strict=True))
    compare_files(Path(name), build.manifest, found)


def require_stored(build: Build, store: Store) -> None:
    """Raises IntegrityError when the store lacks an object of the build, or has it in another size."""
    objects = objects_of(build.manifest)
    if lost := store.missing(objects):
        raise IntegrityError(
            f"{build.version.name}: {store.label} lacks {', '.join(lost)}",
            "`enginegate promote` on the machine that has the engine pushes it again",
        )
