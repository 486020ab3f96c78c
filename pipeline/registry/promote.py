"""Registers a promoted engine as a version in the user's git repository. Nothing else does.

Every condition is checked again at the moment of registration, from the bytes up: files against the manifest,
the manifest against its verdict and the policy, the folder against ``dvc.lock``, ``dvc.lock`` against HEAD. Then
each engine goes through the ``STEPS`` of ``pipeline.registry.steps``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.engines.manifest import SIGNATURE_FILE
from pipeline.errors import PromotionError
from pipeline.files import read_json
from pipeline.registry import git as _git
from pipeline.registry import steps
from pipeline.registry.git import artifact_name, project_name, require_committed, require_full_clone
from pipeline.registry.lock import check_lock, one_at_a_time
from pipeline.registry.promoted import PROMOTE, PROMOTED, promoted_recipes, short, verify_promoted
from pipeline.registry.registration import artifact_of, read_companions
from pipeline.registry.signing import Signer
from pipeline.registry.steps import Plan
from pipeline.registry.store import Store, remote_store
from pipeline.registry.tags import check_names, read_registry

VERDICTS = Path("artifacts/verdicts")
COMMITTED = ("dvc.yaml", "dvc.lock", "policy.yaml")


@dataclass(frozen=True)
class Promotion:
    """What became of one recipe: ``action`` is registered, already, assigned (only a stage was new) or would."""

    recipe: str
    artifact: str
    version: str
    digest: str
    commit: str | None
    tag: str
    stage: str | None
    signed: bool
    action: str


def promote(
    root: Path,
    recipes: tuple[str, ...] = (),
    *,
    name: str | None = None,
    version: str | None = None,
    stage: str | None = None,
    remote: str | None = None,
    signer: Signer | None = None,
    require_signature: bool = False,
    oci: str | None = None,
    dry_run: bool = False,
) -> tuple[list[Promotion], list[str]]:
    """Registers the promoted engines of ``recipes`` (all of them when empty); returns them and warnings.

    All engines are checked before the first byte is pushed. ``name`` stands for the family's name, ``remote`` for
    DVC's default remote; ``oci`` names an OCI registry that gets a copy. Raises IntegrityError for bytes that are not
    those that were judged, PromotionError for everything that forbids a promotion, RegistryError when git's or DVC's
    remote does not answer.
    """
    require_full_clone(root)
    with one_at_a_time(root):
        shared = _git.git_remote(root)
        if shared:
            _git.fetch_tags(root, shared)
        chosen = recipes or tuple(promoted_recipes(root / PROMOTED))
        if not chosen:
            raise PromotionError(
                "no engine was promoted by a verdict yet", "dvc repro; `enginegate gate` shows the verdicts"
            )
        if (name or version) and len(chosen) > 1:
            raise PromotionError("--name and --version are for one recipe", f"name one of: {', '.join(chosen)}")
        policy_digest = _policy(root, signer, require_signature)
        manifests = {recipe: _checked(root, recipe, policy_digest) for recipe in chosen}
        require_committed(root, COMMITTED)
        locked = check_lock(root, PROMOTED)
        store = remote_store(root, remote)
        warnings = _reach(store, shared)
        registry = read_registry(root)
        published = _git.remote_tags(root, shared) if shared else None
        plans = []
        for recipe, manifest in manifests.items():
            artifact = artifact_of(name or artifact_name(f"{project_name(root)}-{recipe}"), manifest)
            check_names(artifact, version, stage)
            existing = registry.with_digest(artifact, manifest["digest"])
            number = existing.version if existing else version or registry.next_version(artifact)
            if not existing and registry.find(artifact, number):
                raise PromotionError(
                    f"{artifact}@{number} is taken", f"`enginegate list {artifact}` shows the versions"
                )
            new_stage = stage if registry.in_stage(artifact, stage or "") != number else None
            plans.append(
                Plan(
                    root=root,
                    recipe=recipe,
                    manifest=manifest,
                    artifact=artifact,
                    version=number,
                    stage=new_stage,
                    existing=existing,
                    registry=registry,
                    locked=locked,
                    store=store,
                    remote=shared,
                    signer=signer,
                    oci=oci,
                )
            )
        return [_carry_out(plan, stage, published, dry_run=dry_run) for plan in plans], warnings


def _policy(root: Path, signer: Signer | None, require_signature: bool) -> str:
    """The digest of the policy that stands, and whether it may be met without a signature."""
    from pipeline.gate.policy import POLICY_FILE, load_policy

    policy = load_policy(root / POLICY_FILE)
    if (require_signature or policy.require_signature) and signer is None:
        raise PromotionError("a signature is required and there is no key", "enginegate promote --sign-key KEY.pem")
    return policy.digest()


def _checked(root: Path, recipe: str, policy_digest: str) -> dict[str, Any]:
    """The manifest of a recipe's promoted engine, every byte of it read."""
    folder = root / PROMOTED / recipe
    if not folder.is_dir():
        raise PromotionError(
            f"{recipe}: no verdict has promoted an engine of this recipe",
            f"`enginegate show {recipe}` says why; `dvc pull promoted` fetches one that was promoted elsewhere",
        )
    manifest = verify_promoted(folder)
    judged = manifest["gate"]["policy_digest"]
    if judged != policy_digest:
        raise PromotionError(
            f"{recipe}: was judged under policy {short(judged)}, policy.yaml is {short(policy_digest)} now",
            "`dvc repro` judges it under the policy that stands",
        )
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


def _reach(store: Store | None, remote: str | None) -> list[str]:
    """A version that others see must have bytes that others can get."""
    if store is None and remote is not None:
        raise PromotionError(
            f"versions are shared through {remote}, but no DVC remote holds the bytes",
            "dvc remote add --default NAME URL (a folder, s3://, gs://, azure://), or --remote NAME",
        )
    if store is None:
        return ["no DVC remote and no git remote: only this clone has the version and the bytes"]
    return [] if remote else ["no git remote: only this clone has the version"]


def _carry_out(plan: Plan, stage: str | None, published: dict[str, str] | None, *, dry_run: bool) -> Promotion:
    tag = plan.registry.version_tag(plan.artifact, plan.version)
    if plan.existing and (published is None or tag in published):
        action = "assigned" if plan.stage else "already"
    else:
        action = "registered"
    if not dry_run:
        for step in steps.AGAIN if action == "already" else steps.STEPS:
            step(plan)
    commit = plan.existing.commit if plan.existing else plan.commit
    signed = SIGNATURE_FILE in read_companions(plan.root, plan.existing) if plan.existing else plan.signer is not None
    done = "would" if dry_run and action != "already" else action
    return Promotion(
        recipe=plan.recipe,
        artifact=plan.artifact,
        version=plan.version,
        digest=plan.manifest["digest"],
        commit=commit,
        tag=tag,
        stage=stage,
        signed=signed,
        action=done,
    )
