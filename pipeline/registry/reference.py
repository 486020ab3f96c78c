"""``NAME``, ``NAME@v1.2.3``, ``NAME#STAGE``: from what a user writes to one registered build.

NAME is an artifact, or a family: the builds of one model and recipe for several backends and GPUs. A family is
answered with the build that runs on this machine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import PromotionError, UnfitError, UsageError
from pipeline.registry.fit import Machine, misfits
from pipeline.registry.registration import family_of, read_manifests
from pipeline.registry.tags import NAME, VERSION, Registry, Version

_REFERENCE = re.compile(rf"(?P<name>{NAME})(?:@(?P<version>{VERSION})|#(?P<stage>{NAME}))?")


@dataclass(frozen=True)
class Reference:
    """What a user wrote."""

    name: str
    version: str | None = None
    stage: str | None = None

    def __str__(self) -> str:
        return self.name + (f"@{self.version}" if self.version else f"#{self.stage}" if self.stage else "")


@dataclass(frozen=True)
class Build:
    """A registered version with its completed manifest."""

    version: Version
    manifest: dict[str, Any]


def parse_reference(text: str) -> Reference:
    """Raises UsageError for what is no reference."""
    found = _REFERENCE.fullmatch(text)
    if not found:
        raise UsageError(f"{text}: not a reference", "write NAME, NAME@v1.2.3 or NAME#STAGE, as in `enginegate list`")
    return Reference(found["name"], found["version"], found["stage"])


def builds(root: Path, registry: Registry, reference: Reference) -> list[Build]:
    """Every build that the reference names, one of each artifact, in the order of their names.

    Raises UsageError when there is none, PromotionError when it was withdrawn, IntegrityError for a registration
    that is not what its tag says.
    """
    near = sorted(name for name in registry.versions if name == reference.name or name.startswith(f"{reference.name}-"))
    versions = [version for name in near if (version := _version(registry, name, reference))]
    manifests = read_manifests(root, versions)
    found = [Build(version, manifests[version.name]) for version in versions]
    found = [build for build in found if reference.name in (build.version.artifact, _family(build))]
    if active := [build for build in found if build.version.active]:
        return active
    if found:
        raise PromotionError(
            f"{reference}: {found[0].version.name} was withdrawn",
            f"`enginegate rollback {found[0].version.artifact}#STAGE` moves a stage back",
        )
    if near and (reference.version or reference.stage):
        what = f"version {reference.version}" if reference.version else f"stage {reference.stage}"
        raise UsageError(f"{reference}: no such {what}", f"`enginegate list {reference.name}` shows what there is")
    known = ", ".join(sorted(registry.versions))
    raise UsageError(
        f"{reference}: not registered",
        f"registered are: {known}" if known else "`git fetch --tags`; `enginegate promote` registers",
    )


def _family(build: Build) -> str:
    return family_of(build.version.artifact, build.manifest)


def _version(registry: Registry, artifact: str, reference: Reference) -> Version | None:
    """The version of an artifact that the reference means, withdrawn or not; without a number, the newest."""
    if reference.version or reference.stage:
        wanted = registry.in_stage(artifact, reference.stage) if reference.stage else reference.version
        return registry.find(artifact, wanted) if wanted else None
    return next(iter([*reversed(registry.active(artifact)), *reversed(registry.versions[artifact])]), None)


def one_build(root: Path, registry: Registry, reference: Reference) -> Build:
    """The build of a reference that must not be ambiguous."""
    found = builds(root, registry, reference)
    if len(found) > 1:
        raise UsageError(
            f"{reference}: several builds: {', '.join(build.version.artifact for build in found)}", "name one of them"
        )
    return found[0]


def fitting_build(found: list[Build], reference: Reference, machine: Machine) -> Build:
    """The build that runs on ``machine``; one for its GPU before one that needs none.

    Raises UnfitError with every build's reason when none does, UsageError when several do.
    """
    reasons = {build.version.name: misfits(build.manifest, machine) for build in found}
    fit = [build for build in found if not reasons[build.version.name]]
    if not fit:
        lines = [f"\n  {name}: {'; '.join(why)}" for name, why in reasons.items()]
        raise UnfitError(
            f"{reference}: no build runs on this machine:{''.join(lines)}",
            "build and promote it for this machine; to pull for another, say --sm and --package NAME=VERSION",
        )
    best = [build for build in fit if build.manifest["validity"]["sm"]] or fit
    if len(best) > 1:
        raise UsageError(
            f"{reference}: several builds run here: {', '.join(build.version.artifact for build in best)}",
            "name one of them",
        )
    return best[0]


def label(manifest: Mapping[str, Any]) -> str:
    """Where a build runs, for people: ``SM 90, tensorrt 10.13``, ``x86_64``."""
    validity = manifest["validity"]
    parts = [f"SM {'/'.join(validity['sm'])}"] if validity["sm"] else [validity["machine"] or "any machine"]
    return ", ".join(parts + [f"{name} {version}" for name, version in sorted(validity["packages"].items())])
