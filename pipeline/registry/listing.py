"""What is registered, as rows for people and machines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import IntegrityError
from pipeline.registry.reference import label
from pipeline.registry.registration import family_of, read_manifests
from pipeline.registry.tags import Registry, Version, read_registry


@dataclass(frozen=True)
class Row:
    """One registered version. ``broken`` says why it cannot be used; then family, recipe and the like are empty."""

    artifact: str
    family: str
    version: str
    digest: str
    active: bool
    stages: tuple[str, ...]
    recipe: str
    backend: str
    runs_on: str
    metrics: tuple[dict[str, Any], ...]
    broken: str = ""


def list_versions(root: Path, name: str | None = None) -> list[Row]:
    """All versions, or those of one artifact or family; newest first within an artifact."""
    registry = read_registry(root)
    rows = [_row(root, registry, version) for versions in registry.versions.values() for version in versions[::-1]]
    return sorted((row for row in rows if name in (None, row.artifact, row.family)), key=lambda row: row.artifact)


def _row(root: Path, registry: Registry, version: Version) -> Row:
    held = registry.stages.get(version.artifact, {})
    stages = tuple(sorted(stage for stage in held if registry.in_stage(version.artifact, stage) == version.version))
    known = (version.version, version.digest, version.active, stages)
    try:
        manifest = read_manifests(root, [version])[version.name]
    except IntegrityError as error:
        return Row(version.artifact, "", *known, "", "", "", (), error.message)
    metrics = tuple(
        {key: row[key] for key in ("name", "slice", "n", "difference", "lower", "upper")}
        for row in manifest["gate"]["metrics"]
        if row["importance"] == "critical"
    )
    family = family_of(version.artifact, manifest)
    return Row(version.artifact, family, *known, manifest["recipe"], manifest["backend"], label(manifest), metrics)
