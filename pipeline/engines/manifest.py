"""``manifest.json``: what an engine is, down to each file's digest.

``digest`` names the engine: it covers everything in the manifest except itself and what is added later (the
verdict at promotion) or differs between equal builds (``build``). No timestamp is in the hashed part.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.errors import IntegrityError
from pipeline.files import digest_json, digest_tree, read_json, write_json

SCHEMA = 1
FILE = "manifest.json"
_IDENTITY = ("schema", "name", "recipe", "backend", "dtype", "limits", "sources", "platform", "files")


def write_manifest(folder: Path, description: dict[str, Any]) -> dict[str, Any]:
    """Hashes the files of ``folder``, completes ``description`` and writes it; returns the manifest.

    ``description`` holds name, recipe, backend, dtype, limits, sources, platform and build.
    """
    manifest = description | {"schema": SCHEMA, "files": digest_tree(folder, exclude=[FILE])}
    manifest["digest"] = manifest_digest(manifest)
    write_json(folder / FILE, manifest)
    return manifest


def manifest_digest(manifest: dict[str, Any]) -> str:
    """The engine's digest, from its identity. Raises IntegrityError when a part is missing."""
    missing = [key for key in _IDENTITY if key not in manifest]
    if missing:
        raise IntegrityError(f"the manifest lacks {', '.join(missing)}", "build the engine again: dvc repro")
    return digest_json({key: manifest[key] for key in _IDENTITY})


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of an engine folder, checked against itself (not against the files)."""
    manifest: dict[str, Any] = read_json(folder / FILE)
    if manifest.get("schema") != SCHEMA:
        raise IntegrityError(
            f"{folder / FILE}: schema {manifest.get('schema')}, this version reads {SCHEMA}", "build the engine again"
        )
    if manifest.get("digest") != manifest_digest(manifest):
        raise IntegrityError(f"{folder / FILE}: the digest does not fit its content", "build the engine again")
    return manifest


def verify_files(folder: Path) -> dict[str, Any]:
    """Reads every byte of an engine folder; returns its manifest.

    Raises IntegrityError naming the first file that is missing, changed or not in the manifest.
    """
    manifest = read_manifest(folder)
    found = digest_tree(folder, exclude=[FILE])
    for name in sorted(set(found) | set(manifest["files"])):
        if name not in found:
            raise IntegrityError(f"{folder / name}: missing", "pull or build the engine again")
        if name not in manifest["files"]:
            raise IntegrityError(f"{folder / name}: not in the manifest", "remove the file or build the engine again")
        if found[name] != manifest["files"][name]:
            raise IntegrityError(f"{folder / name}: its bytes are not those of the manifest", "pull or build it again")
    return manifest
