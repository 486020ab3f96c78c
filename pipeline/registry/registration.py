"""A registered version's commit: a child of the commit that was promoted, on no branch, held by the version's tag.

Beside everything of its parent it has the DVC artifact (an entry under ``artifacts:`` in ``dvc.yaml``, so that
`dvc artifacts get` works) and ``registry/ARTIFACT/`` with the completed manifest, provenance, bill of materials and
signature. So one tag brings all or nothing into being, and nobody's branch or working tree is touched.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from pipeline.engines.manifest import COMPANIONS, FILE, check_manifest
from pipeline.errors import IntegrityError
from pipeline.files import digest_file
from pipeline.registry.git import commit_with, git, git_remote, read_blobs, subfolder
from pipeline.registry.promoted import check_gate
from pipeline.registry.tags import Version

FOLDER = "registry"


def target(manifest: Mapping[str, Any]) -> str:
    """What a build is for, in a name: ``sm90``, ``sm89-sm120`` or the processor architecture."""
    validity = manifest["validity"]
    if validity["sm"]:
        return "-".join(f"sm{sm}" for sm in validity["sm"])
    return validity["machine"] or "any"


def artifact_of(family: str, manifest: Mapping[str, Any]) -> str:
    """The artifact of one build: model and recipe (the family), backend, what it was built for."""
    return f"{family}-{manifest['backend']}-{target(manifest)}"


def family_of(artifact: str, manifest: Mapping[str, Any]) -> str:
    """The name that all builds of one recipe share."""
    return artifact.removesuffix(f"-{manifest['backend']}-{target(manifest)}")


def provenance_of(root: Path) -> dict[str, Any]:
    """The ``provenance`` section: the commit that is promoted, its ``dvc.lock``, the CI run."""
    remote = git_remote(root)
    return {
        "repository": without_credentials(git(root, "remote", "get-url", remote)) if remote else None,
        "commit": git(root, "rev-parse", "HEAD"),
        "dvc_lock": digest_file(root / "dvc.lock"),
        "ci_run": ci_run(os.environ),
    }


def without_credentials(url: str) -> str:
    """A remote's address without user and password of an http URL."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https"):
        return url
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def ci_run(environment: Mapping[str, str]) -> str | None:
    """The address of the CI run, None outside of CI."""
    if run := environment.get("GITHUB_RUN_ID"):
        return f"{environment.get('GITHUB_SERVER_URL')}/{environment.get('GITHUB_REPOSITORY')}/actions/runs/{run}"
    return environment.get("CI_JOB_URL") or environment.get("BUILD_URL")  # GitLab, Jenkins


def write_commit(root: Path, manifest: dict[str, Any], companions: Mapping[str, bytes], message: str) -> str:
    """Writes the commit of a registration; returns its id. ``companions`` are the files beside the manifest."""
    place, head = subfolder(root), manifest["provenance"]["commit"]
    artifact = manifest["registration"]["artifact"]
    listed = read_blobs(root, [f"{head}:{place}dvc.yaml"])[0] or b""
    files = {f"{place}dvc.yaml": _with_artifact(listed, manifest)}
    files |= {f"{place}{FOLDER}/{artifact}/{name}": content for name, content in companions.items()}
    return commit_with(root, head, files, message)


def _with_artifact(dvc_yaml: bytes, manifest: dict[str, Any]) -> bytes:
    """``dvc.yaml`` with the entry of this artifact; comments stay."""
    from ruamel.yaml import YAML

    yaml = YAML()
    yaml.width = 4096  # no line of the user's is wrapped
    content = yaml.load(dvc_yaml.decode()) or {}
    registration, gate = manifest["registration"], manifest["gate"]
    content.setdefault("artifacts", {})[registration["artifact"]] = {
        "path": registration["path"],
        "type": "model",
        "desc": f"{manifest['recipe']} for {manifest['backend']}, {manifest['dtype']}",
        "labels": ["engine", manifest["backend"], target(manifest)],
        "meta": {"digest": manifest["digest"], "policy_digest": gate["policy_digest"]},
    }
    stream = io.StringIO()
    yaml.dump(content, stream)
    return stream.getvalue().encode()


def read_manifests(root: Path, versions: list[Version]) -> dict[str, dict[str, Any]]:
    """The completed manifests of registered versions, by ``artifact@version``, each checked.

    Raises IntegrityError for a version whose commit has none, or another's.
    """
    place = subfolder(root)
    found = read_blobs(root, [f"{one.commit}:{place}{FOLDER}/{one.artifact}/{FILE}" for one in versions])
    return {one.name: _checked(one, content) for one, content in zip(versions, found, strict=True)}


def _checked(version: Version, content: bytes | None) -> dict[str, Any]:
    if content is None:
        raise IntegrityError(
            f"{version.name}: its commit {version.commit[:12]} holds no registration",
            "it was not made by `enginegate promote`; `gto deprecate NAME VERSION --push` withdraws it",
        )
    manifest: dict[str, Any] = json.loads(content)
    check_manifest(manifest, version.name)
    check_gate(manifest, version.name)
    entry = manifest.get("registration")
    told = (entry["artifact"], entry["version"], manifest["digest"]) if entry else None
    if told != (version.artifact, version.version, version.digest):
        raise IntegrityError(
            f"{version.name}: the tag names {version.digest}, its commit registers {told}",
            "the tag was moved or made by hand: do not use this version",
        )
    return manifest


def read_companions(root: Path, version: Version) -> dict[str, bytes]:
    """The files that stand beside a registered version's manifest, the manifest among them."""
    place = subfolder(root)
    found = read_blobs(root, [f"{version.commit}:{place}{FOLDER}/{version.artifact}/{name}" for name in COMPANIONS])
    return {name: content for name, content in zip(COMPANIONS, found, strict=True) if content is not None}
