"""Registers a promoted engine as a version in the user's git repository. Nothing else does.

Every condition is checked again at the moment of registration, from the bytes up: files against the manifest,
the manifest against its verdict, the folder against ``dvc.lock``, ``dvc.lock`` against HEAD.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import PromotionError
from pipeline.files import read_json
from pipeline.registry.git import artifact_name, git, project_name, require_committed, require_full_clone
from pipeline.registry.lock import check_lock
from pipeline.registry.promoted import PROMOTE, PROMOTED, promoted_recipes, short, verify_promoted
from pipeline.registry.versions import check_names, next_version, register_version, registered_version

VERDICTS = Path("artifacts/verdicts")


@dataclass(frozen=True)
class Promotion:
    """What became of one recipe: ``action`` is registered, already or would (a dry run)."""

    recipe: str
    artifact: str
    version: str
    digest: str
    commit: str
    action: str

    @property
    def tag(self) -> str:
        """The git tag."""
        return f"{self.artifact}@{self.version}"


def promote(
    root: Path,
    recipes: tuple[str, ...] = (),
    *,
    name: str | None = None,
    version: str | None = None,
    dry_run: bool = False,
) -> tuple[list[Promotion], list[str]]:
    """Registers the promoted engines of ``recipes`` (all of them when empty); returns them and warnings.

    All engines are checked before the first tag is written. Raises IntegrityError for bytes that are not those
    that were judged, PromotionError for everything that forbids a promotion.
    """
    require_full_clone(root)
    chosen = recipes or tuple(promoted_recipes(root / PROMOTED))
    if not chosen:
        raise PromotionError(
            "no engine was promoted by a verdict yet", "dvc repro; `enginegate gate` shows the verdicts"
        )
    if (name or version) and len(chosen) > 1:
        raise PromotionError("--name and --version are for one recipe", f"name one of: {', '.join(chosen)}")
    manifests = {recipe: _checked(root, recipe) for recipe in chosen}
    require_committed(root, ("dvc.yaml", "dvc.lock"))
    warnings = check_lock(root, PROMOTED)
    planned = []
    for recipe, manifest in manifests.items():
        artifact = name or artifact_name(f"{project_name(root)}-{recipe}")
        check_names(artifact, version)
        planned.append((recipe, manifest, artifact))
    return [_register(root, *plan, version=version, dry_run=dry_run) for plan in planned], warnings


def _checked(root: Path, recipe: str) -> dict[str, Any]:
    """The manifest of a recipe's promoted engine, every byte of it read."""
    folder = root / PROMOTED / recipe
    if not folder.is_dir():
        raise PromotionError(
            f"{recipe}: no verdict has promoted an engine of this recipe",
            f"`enginegate show {recipe}` says why; `dvc pull promoted` fetches one that was promoted elsewhere",
        )
    manifest = verify_promoted(folder)
    latest = root / VERDICTS / f"{recipe}.json"
    if latest.exists():
        verdict = read_json(latest)
        if verdict["engine_digest"] == manifest["digest"] and verdict["verdict"] != PROMOTE:
            raise PromotionError(
                f"{recipe}: the newest verdict on {short(manifest['digest'])} is {verdict['verdict']}, "
                "though an earlier one was PROMOTE",
                f"`enginegate show {latest}` says why",
            )
    return manifest


def _register(
    root: Path, recipe: str, manifest: dict[str, Any], artifact: str, *, version: str | None, dry_run: bool
) -> Promotion:
    digest = manifest["digest"]
    commit = git(root, "rev-parse", "HEAD")
    if existing := registered_version(root, artifact, digest):
        commit = git(root, "rev-list", "-n1", f"refs/tags/{artifact}@{existing}")
        return Promotion(recipe, artifact, existing, digest, commit, "already")
    number = version or next_version(root, artifact)
    if not dry_run:
        register_version(root, artifact, number, digest, _message(recipe, manifest))
    return Promotion(recipe, artifact, number, digest, commit, "would" if dry_run else "registered")


def _message(recipe: str, manifest: dict[str, Any]) -> str:
    """The tag's message: what a reader of `git show` wants to know."""
    verdict = manifest["verdict"]
    lines = [f"{recipe} for {manifest['backend']}: {verdict['verdict']}", ""]
    lines += [f"- {reason}" for reason in verdict["reasons"]]
    return "\n".join([*lines, "", f"policy-digest: {verdict['policy_digest']}"])
