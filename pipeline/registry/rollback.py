"""Moves a stage to a version that is registered already, back or (``to``) anywhere; the history stays in the tags."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import PromotionError, UsageError
from pipeline.registry import git as _git
from pipeline.registry.lock import one_at_a_time
from pipeline.registry.reference import Build, Reference, parse_reference
from pipeline.registry.registration import family_of, read_manifests
from pipeline.registry.store import remote_store
from pipeline.registry.tags import Registry, check_names, make_tag, publish, read_registry
from pipeline.registry.verify import require_stored


@dataclass(frozen=True)
class Moved:
    """What a stage held and holds."""

    artifact: str
    stage: str
    before: str | None
    after: str
    tag: str


def rollback(
    root: Path, text: str, *, to: str | None = None, remote: str | None = None, dry_run: bool = False
) -> Moved:
    """Moves ``NAME#STAGE`` to ``to``, or to the version that the stage held before the present one.

    The version must be active and its bytes still in the store. Raises UsageError and PromotionError, also when
    somebody else moves the stage at the same moment.
    """
    reference = parse_reference(text)
    if reference.stage is None:
        raise UsageError(f"{text}: names no stage", "write NAME#STAGE, such as shop-int8_mixed#production")
    check_names(reference.name, to, reference.stage)
    _git.require_full_clone(root)
    with one_at_a_time(root):
        shared = _git.git_remote(root)
        if shared:
            _git.fetch_tags(root, shared)
        registry = read_registry(root)
        artifact = _artifact(root, registry, reference, to)
        before = registry.in_stage(artifact, reference.stage)
        after = to or _earlier(registry, artifact, reference.stage)
        target = registry.find(artifact, after)
        if target is None or not target.active:
            raise PromotionError(
                f"{artifact}@{after}: {'withdrawn' if target else 'not registered'}",
                f"`enginegate list {artifact}`; name another with --to",
            )
        if before == after:
            raise PromotionError(f"{artifact}#{reference.stage} holds {after} already", "name another with --to")
        store = remote_store(root, remote)
        if store is not None:
            require_stored(Build(target, read_manifests(root, [target])[target.name]), store)
        tag = registry.stage_tag(artifact, reference.stage)
        if not dry_run:
            message = f"{reference.stage}: {before or 'empty'} -> {after} (rollback)"
            tags = {tag: make_tag(root, tag, target.commit, message, registry.newest[artifact])}
            publish(root, shared, tags)
            if shared:
                _git.set_tags(root, tags)
        return Moved(artifact, reference.stage, before, after, tag)


def _artifact(root: Path, registry: Registry, reference: Reference, to: str | None) -> str:
    """The artifact that the reference means: the one of this name, or the only one of the family with the stage."""
    if reference.name in registry.versions:
        return reference.name
    near = [name for name in registry.versions if name.startswith(f"{reference.name}-")]
    newest = {name: registry.versions[name][-1] for name in near}
    manifests = read_manifests(root, list(newest.values()))
    family = [name for name in near if family_of(name, manifests[newest[name].name]) == reference.name]
    found = [name for name in family if to or registry.stages.get(name, {}).get(reference.stage or "")]
    if not found:
        raise UsageError(f"{reference}: no such stage", "`enginegate list` shows what there is")
    if len(found) > 1:
        raise UsageError(f"{reference}: several builds: {', '.join(found)}", "name one of them")
    return found[0]


def _earlier(registry: Registry, artifact: str, stage: str) -> str:
    """The version that the stage held before the one it holds, that is still active.

    A version that the stage was moved away from backwards is not come back to: after v1, v2, v3 and a rollback to
    v2, the next one goes to v1.
    """
    held: list[str] = []
    for move in registry.stages.get(artifact, {}).get(stage, []):
        if move.version in held:
            del held[held.index(move.version) + 1 :]
        elif move.version is not None:
            held.append(move.version)
    active = {version.version for version in registry.active(artifact)}
    now = registry.in_stage(artifact, stage)
    for version in reversed(held):
        if version != now and version in active:
            return version
    raise PromotionError(
        f"{artifact}#{stage}: held no earlier version that is still active",
        f"`enginegate list {artifact}` shows the versions; name one with --to",
    )
