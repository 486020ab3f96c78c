"""``manifest.json``: what an engine is, down to each file's digest.

Its sections are described in docs/registry.md and checked, on every read and write, against
``manifest.schema.json`` beside this module. ``digest`` names the engine: it covers the identity (the keys of
``IDENTITY``), and so neither itself, nor what is added later (the gate's evidence at promotion, the registration),
nor what differs between equal builds (``build``). No timestamp is in the hashed part.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from pipeline.errors import IntegrityError
from pipeline.files import canonical_json, digest_json, digest_tree, read_json, write_json

SCHEMA = 1
FILE = "manifest.json"
SCHEMA_FILE = Path(__file__).with_name("manifest.schema.json")
# What a registered engine has beside its files: they speak about the engine and are no part of it.
PROVENANCE_FILE, SBOM_FILE, SIGNATURE_FILE = "provenance.json", "sbom.cdx.json", "model.sig"
COMPANIONS = (FILE, PROVENANCE_FILE, SBOM_FILE, SIGNATURE_FILE)
IDENTITY = ("schema", "name", "recipe", "backend", "dtype", "limits", "sources", "platform", "validity", "files")
# Packages whose exact version an engine of this backend needs, among those that it was built with.
_EXACT = {"tensorrt": ("tensorrt", "tensorrt_rtx"), "tensorrt_llm": ("tensorrt", "tensorrt_llm")}


def write_manifest(folder: Path, description: dict[str, Any]) -> dict[str, Any]:
    """Hashes the files of ``folder``, completes ``description`` and writes it; returns the manifest.

    ``description`` holds name, recipe, backend, dtype, limits, sources, platform and build, and may hold
    ``validity`` (see ``validity_of``) and ``calibration``. Raises IntegrityError when it breaks the schema.
    """
    plain: dict[str, Any] = json.loads(canonical_json(description))  # tuples become lists, as a reader will find them
    manifest = plain | {"schema": SCHEMA, "files": digest_tree(folder, exclude=COMPANIONS)}
    manifest.setdefault("validity", validity_of(manifest))
    manifest["digest"] = manifest_digest(manifest)
    save_manifest(folder, manifest)
    return manifest


def save_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Writes a manifest that was completed, checked against the schema."""
    check_manifest(manifest, str(folder / FILE))
    write_json(folder / FILE, manifest)


def validity_of(manifest: dict[str, Any]) -> dict[str, Any]:
    """Where an engine may be loaded, for a backend that does not say it itself.

    ``machine``: the processor architecture. ``sm``: GPU architectures such as ``["90"]``, or None when it is compiled
    for none. ``packages``: versions that must be exactly these. What TensorRT compiled runs on the SM and the versions
    that it was built with (TensorRT refuses it elsewhere); TensorRT-LLM's checkpoint for PyTorch on its version; a
    graph for ONNX Runtime and a checkpoint for vLLM on any machine of the architecture.
    """
    platform, build, backend = manifest["platform"], manifest.get("build", {}), manifest["backend"]
    versions: dict[str, Any] = build.get("versions", {})
    names: tuple[str, ...] = _EXACT.get(backend, ())
    sm = None
    if backend == "tensorrt_llm" and build.get("profile") == "pytorch":
        names = ("tensorrt_llm",)
    elif names:
        sm = build.get("runtime", {}).get("sm") or platform.get("sm")  # "89 120" when compiled for several
    return {
        "machine": (platform.get("cpu") or "").split(" ")[0] or None,
        "sm": sm.split() if sm else None,
        "packages": {name: versions[name] for name in names if versions.get(name)},
    }


def manifest_digest(manifest: dict[str, Any]) -> str:
    """The engine's digest, from its identity. Raises IntegrityError when a part is missing."""
    missing = [key for key in IDENTITY if key not in manifest]
    if missing:
        raise IntegrityError(f"the manifest lacks {', '.join(missing)}", "build the engine again: dvc repro")
    return digest_json({key: manifest[key] for key in IDENTITY})


def check_manifest(manifest: Any, place: str) -> None:
    """Checks version, schema and digest of a manifest. Raises IntegrityError that names ``place`` and the key."""
    version = manifest.get("schema") if isinstance(manifest, dict) else None
    if isinstance(version, int) and version > SCHEMA:
        raise IntegrityError(
            f"{place}: schema {version} is newer than this enginegate, which reads {SCHEMA}", "upgrade enginegate"
        )
    if version != SCHEMA:
        raise IntegrityError(f"{place}: schema {version}, this version reads {SCHEMA}", "build the engine again")
    found = next(_validator().iter_errors(manifest), None)
    if found is not None:
        key = ".".join(str(part) for part in found.absolute_path) or "top level"
        raise IntegrityError(f"{place}: {key}: {found.message[:300]}", "build the engine again")
    if manifest["digest"] != manifest_digest(manifest):
        raise IntegrityError(f"{place}: the digest does not fit its content", "build the engine again")


@functools.cache
def _validator() -> Any:
    from jsonschema import Draft202012Validator

    return Draft202012Validator(json.loads(SCHEMA_FILE.read_text(encoding="utf-8")))


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of an engine folder, checked against schema and digest (not against the files)."""
    manifest: dict[str, Any] = read_json(folder / FILE)
    check_manifest(manifest, str(folder / FILE))
    return manifest


def verify_files(folder: Path) -> dict[str, Any]:
    """Reads every byte of an engine folder; returns its manifest.

    Raises IntegrityError naming the first file that is missing, changed or not in the manifest.
    """
    manifest = read_manifest(folder)
    compare_files(folder, manifest, digest_tree(folder, exclude=COMPANIONS))
    return manifest


def compare_files(folder: Path, manifest: dict[str, Any], found: dict[str, str]) -> None:
    """Checks digests that were found in ``folder`` (by file name) against the manifest's."""
    for name in sorted(set(found) | set(manifest["files"])):
        if name not in found:
            raise IntegrityError(f"{folder / name}: missing", "pull or build the engine again")
        if name not in manifest["files"]:
            raise IntegrityError(f"{folder / name}: not in the manifest", "remove the file or build the engine again")
        if found[name] != manifest["files"][name]:
            raise IntegrityError(f"{folder / name}: its bytes are not those of the manifest", "pull or build it again")
