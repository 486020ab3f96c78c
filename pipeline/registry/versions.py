"""Versions of an engine: annotated git tags of GTO, ``<artifact>@v1.2.3``, whose message names the digest.

GTO versions commits, not content, so that the same engine on a later commit would get a new version. The digest
in the message makes registration idempotent by content.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pipeline.errors import PromotionError, UsageError

_DIGEST = re.compile(r"^engine-digest: (sha256:[0-9a-f]{64})$", re.MULTILINE)


def registered_version(root: Path, artifact: str, digest: str) -> str | None:
    """The newest active version of ``artifact`` with this digest, or None."""
    from gto.registry import GitRegistry

    with GitRegistry.from_url(root) as registry:
        for version in _active(registry, artifact):
            if _digest_of(version) == digest:
                return str(version.version)
    return None


def next_version(root: Path, artifact: str) -> str:
    """The version that follows the newest one; the first is v0.0.1."""
    from gto.registry import GitRegistry
    from gto.versions import SemVer

    with GitRegistry.from_url(root) as registry:
        versions = [SemVer(version.version) for version in _all(registry, artifact)]
    return str((max(versions).bump_patch() if versions else SemVer.get_minimal()).version)


def register_version(root: Path, artifact: str, version: str, digest: str, message: str) -> str:
    """Writes the tag on HEAD; returns its name. Raises PromotionError with GTO's reason."""
    import gto.api
    from gto.exceptions import GTOException
    from scmrepo.exceptions import SCMError

    try:
        gto.api.register(root, artifact, "HEAD", version=version, message=f"{message}\n\nengine-digest: {digest}\n")
    except GTOException as error:
        raise PromotionError(
            f"{artifact}@{version}: {error}", "`gto show` lists the versions; choose another"
        ) from error
    except SCMError as error:
        raise PromotionError(
            f"git could not write the tag {artifact}@{version}: {error}",
            "git config user.name and user.email, and check that .git is writable",
        ) from error
    return f"{artifact}@{version}"


def check_names(artifact: str, version: str | None) -> None:
    """Refuses names that GTO would not take."""
    from gto.constants import check_string_is_valid
    from gto.versions import SemVer

    if not check_string_is_valid(artifact):
        raise UsageError(f"--name {artifact}: not a GTO name", "use letters, digits, `-`, `_` and `/`")
    if version is not None and not SemVer.is_valid(version):
        raise UsageError(f"--version {version}: not a version", "write it as v1.2.3")


def _all(registry: Any, artifact: str) -> list[Any]:
    found = registry.find_artifact(artifact, create_new=True)
    return list(found.get_versions(active_only=False))


def _active(registry: Any, artifact: str) -> list[Any]:
    """Active versions, newest first."""
    return list(registry.find_artifact(artifact, create_new=True).get_versions(active_only=True))


def _digest_of(version: Any) -> str | None:
    for event in version.get_events():
        if found := _DIGEST.search(getattr(event, "message", "") or ""):
            return found.group(1)
    return None
