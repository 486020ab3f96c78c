"""What is different between two engines: recipe, metrics, flags, files, platform."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.engines.manifest import FILE, read_manifest
from pipeline.errors import UsageError
from pipeline.registry.git import read_blobs, subfolder
from pipeline.registry.reference import one_build, parse_reference
from pipeline.registry.tags import read_registry

_SECTIONS = ("sources", "calibration", "build", "limits", "platform", "validity", "performance", "provenance")
_NUMBERS = ("n", "baseline", "candidate", "difference", "lower", "upper", "outcome")


@dataclass(frozen=True)
class Side:
    """One of two engines: its manifest and, when it is registered, its recipe's text."""

    name: str
    manifest: dict[str, Any]
    recipe: str | None


def read_side(root: Path, text: str) -> Side:
    """An engine by its folder or its reference. Raises UsageError when it is neither."""
    folder = Path(text)
    if (folder / FILE).is_file():
        return Side(text, read_manifest(folder), None)
    if folder.is_dir():
        raise UsageError(f"{text}: a folder without {FILE}", "name an engine's folder, or a reference")
    build = one_build(root, read_registry(root), parse_reference(text))
    place = f"{build.version.commit}:{subfolder(root)}recipes/{build.manifest['recipe']}.yaml"
    content = read_blobs(root, [place])[0]
    return Side(build.version.name, build.manifest, content.decode() if content is not None else None)


def compare(one: Side, other: Side) -> dict[str, Any]:
    """The differences as JSON data: each value is a pair, or None where one side has nothing."""
    first, second = one.manifest, other.manifest
    identity = {key: [first[key], second[key]] for key in ("digest", "recipe", "backend", "dtype")}
    return {
        "sides": [one.name, other.name],
        "identity": {key: pair for key, pair in identity.items() if pair[0] != pair[1]},
        "recipe": _text_diff(one, other),
        "sections": {
            name: found for name in _SECTIONS if (found := _changed(first.get(name, {}), second.get(name, {})))
        },
        "files": _changed(first["files"], second["files"]),
        "metrics": _metrics(first, second),
        "policy": _changed(
            *({"digest": manifest.get("gate", {}).get("policy_digest")} for manifest in (first, second))
        ),
    }


def _text_diff(one: Side, other: Side) -> list[str]:
    if one.recipe is None or other.recipe is None:
        return []
    lines = difflib.unified_diff(one.recipe.splitlines(), other.recipe.splitlines(), one.name, other.name, lineterm="")
    return list(lines)


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Nested values by their dotted names."""
    if isinstance(value, Mapping) and value:
        return {
            key: found
            for part, child in value.items()
            for key, found in _flat(child, f"{name}.{part}" if name else str(part)).items()
        }
    return {name: value} if name else {}


def _changed(first: Any, second: Any) -> dict[str, list[Any]]:
    one, other = _flat(first), _flat(second)
    return {key: [one.get(key), other.get(key)] for key in sorted({*one, *other}) if one.get(key) != other.get(key)}


def _metrics(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every metric of both, equal or not: a reader wants to see them side by side."""
    rows = [
        {(row["name"], row["slice"]): row for row in side.get("gate", {}).get("metrics", [])}
        for side in (first, second)
    ]
    found = []
    for name, part in sorted({*rows[0], *rows[1]}):
        sides = [side.get((name, part)) for side in rows]
        found.append(
            {
                "name": name,
                "slice": part,
                "sides": [None if row is None else {key: row[key] for key in _NUMBERS} for row in sides],
            }
        )
    return found
