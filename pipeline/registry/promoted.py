"""``engines/promoted/``: each recipe's last good engine, its manifest completed by the verdict that let it in.

Only a PROMOTE verdict for the very bytes that were evaluated replaces what is there. After a refusal the engine
promoted earlier stays: it is what serves.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.engines.manifest import FILE, save_manifest, verify_files
from pipeline.errors import EnginegateError, IntegrityError
from pipeline.files import atomic_folder, clear_leftovers, digest_file, digest_json, read_json

PROMOTED = Path("engines/promoted")
PROMOTE = "PROMOTE"
_METRIC_KEYS = (
    *("name", "importance", "slice", "n", "baseline", "candidate", "difference", "lower", "upper"),
    *("confidence", "margin", "margin_kind", "margin_points", "method", "signature", "outcome"),
)


@dataclass(frozen=True)
class Kept:
    """What became of one recipe: ``word`` is promoted, unchanged, kept (an earlier engine) or none."""

    recipe: str
    word: str
    digest: str | None
    note: str


def promote_engine(recipe: str, verdict_file: Path, engine: Path, target: Path = PROMOTED) -> Kept:
    """Brings ``target/<recipe>`` in line with the recipe's verdict.

    Raises IntegrityError when the engine's bytes are not those that the verdict speaks of.
    """
    verdict = read_json(verdict_file)
    place = target / recipe
    before = _promoted_digest(place, replaceable=verdict["verdict"] == PROMOTE)
    if verdict["recipe"] != recipe:
        raise IntegrityError(f"{verdict_file}: is the verdict of {verdict['recipe']}", "run `dvc repro` again")
    if verdict["verdict"] != PROMOTE:
        return _left(recipe, verdict, before)
    evaluated = verdict["engine_digest"]
    if before == evaluated:
        return Kept(recipe, "unchanged", before, f"{short(before)} is promoted already")
    with atomic_folder(place) as part:
        shutil.copytree(engine, part, dirs_exist_ok=True)
        manifest = verify_files(part)  # the copy, so that what was hashed is what is promoted
        if manifest["digest"] != evaluated:
            raise IntegrityError(
                f"{engine}: is {manifest['digest']}, but {verdict_file} judged {evaluated}",
                "run `dvc repro`: it builds, asks and judges the same engine",
            )
        save_manifest(part, manifest | _measured(verdict) | {"gate": evidence(verdict, digest_file(verdict_file))})
    note = f"{short(evaluated)} takes the place of {short(before)}" if before else short(evaluated)
    return Kept(recipe, "promoted", evaluated, note)


def _measured(verdict: dict[str, Any]) -> dict[str, Any]:
    """The ``performance`` section: the policy's service levels as they were measured on the baseline and the engine."""
    levels = {
        role: [row for row in rows if row["outcome"] != "absent"] for role, rows in verdict.get("service", {}).items()
    }
    return {"performance": levels} if any(levels.values()) else {}


def evidence(verdict: dict[str, Any], file_digest: str) -> dict[str, Any]:
    """The ``gate`` section of a promoted manifest: why this engine may serve.

    ``floor`` of a metric is its A/A comparison: how far the baseline's own repeat is from it. ``seal`` is the
    digest of the rest, so that a changed number shows without the verdict file.
    """
    parts = verdict["attribution"].get("metrics", {})
    floors = {(name, "all"): part.get("noise") for name, part in parts.items()}
    section = {
        "verdict": verdict["verdict"],
        "recipe": verdict["recipe"],
        "engine_digest": verdict["engine_digest"],
        "reasons": verdict["reasons"],
        "policy_digest": verdict["policy_digest"],
        "metrics": [
            {key: row[key] for key in _METRIC_KEYS} | {"floor": floors.get((row["name"], row["slice"]))}
            for row in verdict["metrics"]
        ],
        "fidelity": verdict["fidelity"],
        "attempt": len(verdict["ledger"]),
        "ledger_entry": verdict["ledger"][-1] if verdict["ledger"] else None,
        "file_digest": file_digest,
    }
    return section | {"seal": digest_json(section)}


def verify_promoted(folder: Path) -> dict[str, Any]:
    """Reads every byte of a promoted engine; returns its manifest.

    Raises IntegrityError when a file or the verdict is not what the manifest says, or the verdict is not
    PROMOTE for this very engine.
    """
    manifest = verify_files(folder)
    check_gate(manifest, str(folder / FILE))
    return manifest


def check_gate(manifest: dict[str, Any], place: str) -> None:
    """Raises IntegrityError unless the manifest holds a sealed PROMOTE for this very engine."""
    section = manifest.get("gate")
    again = "restore it with `dvc checkout promoted`, or run `dvc repro`"
    if not isinstance(section, dict):
        raise IntegrityError(f"{place}: holds no verdict", again)
    if section.get("seal") != digest_json({key: value for key, value in section.items() if key != "seal"}):
        raise IntegrityError(f"{place}: the verdict was changed after the promotion", again)
    if section["verdict"] != PROMOTE or section["engine_digest"] != manifest["digest"]:
        raise IntegrityError(
            f"{place}: the verdict is {section['verdict']} for {section['engine_digest']}, "
            f"the engine is {manifest['digest']}",
            again,
        )


def recover(target: Path = PROMOTED) -> None:
    """Puts right what a killed promotion left: an old folder goes back to its place, half copies go away.

    ``target`` is an output of DVC, so nothing but whole engines may stay in it.
    """
    target.mkdir(parents=True, exist_ok=True)
    leftovers = [*target.glob(".*.old"), *target.glob(".*.part")]
    for name in {left.name[1:].rsplit(".", 2)[0] for left in leftovers}:  # atomic_folder: .NAME.RANDOM.old
        clear_leftovers(target / name)


def short(digest: str | None) -> str:
    """The first twelve digits of a digest, for people."""
    return digest.removeprefix("sha256:")[:12] if digest else "nothing"


def _left(recipe: str, verdict: dict[str, Any], before: str | None) -> Kept:
    word = verdict["verdict"]
    if before is None:
        return Kept(recipe, "none", None, f"{word}; no engine of this recipe was promoted before")
    if before == verdict["engine_digest"]:
        note = f"{word} for {short(before)}, which an earlier verdict promoted: it stays until replaced"
        return Kept(recipe, "kept", before, note)
    return Kept(recipe, "kept", before, f"{word}; {short(before)}, promoted earlier, stays")


def _promoted_digest(place: Path, *, replaceable: bool) -> str | None:
    """The digest of the engine in ``place``; None when there is none, or a damaged one that can be replaced."""
    if not (place / FILE).exists():
        return None
    try:
        digest: str = verify_promoted(place)["digest"]
    except EnginegateError as error:
        if not replaceable:
            raise
        print(f"warning: {error.message}; it is copied again", flush=True)
        return None
    return digest


def promoted_recipes(target: Path = PROMOTED) -> list[str]:
    """The recipes that have a promoted engine, sorted."""
    return sorted(path.name for path in target.glob("[!.]*") if path.is_dir())
