"""Versions and stages: annotated git tags in the grammar of GTO, read and made with git alone.

``NAME@v1.2.3`` registers a version, ``NAME@v1.2.3!`` withdraws it, ``NAME#STAGE#4`` puts the version on the same
commit into a stage, ``NAME#STAGE!#5`` takes it out; a project in a subfolder of its repository has ``FOLDER=`` before
the name. (Source: ``gto/constants.py`` and ``gto/tag.py`` of GTO 1.10; a test compares.) `gto show` and
`dvc artifacts get` read these tags.

GTO versions commits, not content. The message of a version tag therefore names the engine's digest, which makes
registration idempotent by content; a version tag without it is somebody else's and is left alone.

GTO orders events by the tagger's second, this module by the counter, which is the same in every clone. Both agree
because a new tag is dated at least one second after the artifact's newest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.errors import PromotionError, UsageError
from pipeline.registry import git as _git
from pipeline.registry.git import git

NAME = "[a-zA-Z0-9](?:[a-zA-Z0-9-/_]*[a-zA-Z0-9])?"
VERSION = r"v(?:0|[1-9]\d*)\.(?:0|[1-9]\d*)\.(?:0|[1-9]\d*)"
_TAG = re.compile(
    rf"(?:(?P<folder>[a-zA-Z0-9-_./]+)=)?(?P<name>{NAME})"
    rf"(?:#(?P<stage>{NAME})|@(?P<version>{VERSION}))(?P<cancel>!?)(?:#(?P<counter>\d+))?"
)
_DIGEST = re.compile(r"^engine-digest: (sha256:[0-9a-f]{64})$", re.MULTILINE)
_FORMAT = "%00".join(
    ("%(refname:strip=2)", "%(objecttype)", "%(objectname)", "%(*objectname)", "%(taggerdate:unix)", "%(contents)%01")
)


@dataclass(frozen=True)
class Version:
    """A registered version of an artifact."""

    artifact: str
    version: str
    digest: str
    commit: str  # the registration commit
    tag: str
    tag_object: str
    active: bool = True

    @property
    def name(self) -> str:
        """``artifact@version``, as a user writes it."""
        return f"{self.artifact}@{self.version}"


@dataclass(frozen=True)
class Move:
    """One event of a stage; ``version`` is None where the stage was emptied."""

    counter: int
    version: str | None
    tag: str
    time: int
    message: str


@dataclass
class Registry:
    """Everything that the tags of a clone say about one project."""

    folder: str  # of the project in its repository, as git's prefix
    versions: dict[str, list[Version]] = field(default_factory=dict)  # by artifact, oldest first
    stages: dict[str, dict[str, list[Move]]] = field(default_factory=dict)  # by artifact and stage, oldest first
    counters: dict[str, int] = field(default_factory=dict)
    newest: dict[str, int] = field(default_factory=dict)  # time of each artifact's newest tag, seconds

    def active(self, artifact: str) -> list[Version]:
        """Versions that were not withdrawn, oldest first."""
        return [version for version in self.versions.get(artifact, []) if version.active]

    def find(self, artifact: str, version: str) -> Version | None:
        """The version of this name, withdrawn or not."""
        return next((one for one in self.versions.get(artifact, []) if one.version == version), None)

    def with_digest(self, artifact: str, digest: str) -> Version | None:
        """The newest active version with this content."""
        return next((one for one in reversed(self.active(artifact)) if one.digest == digest), None)

    def in_stage(self, artifact: str, stage: str) -> str | None:
        """The version that a stage holds now."""
        moves = self.stages.get(artifact, {}).get(stage, [])
        return moves[-1].version if moves else None

    def next_version(self, artifact: str) -> str:
        """The next patch version; the first is v0.0.1. A withdrawn number is not used again."""
        major, minor, patch = max([number(one.version) for one in self.versions.get(artifact, [])] or [(0, 0, 0)])
        return f"v{major}.{minor}.{patch + 1}"

    def version_tag(self, artifact: str, version: str) -> str:
        """The tag of a version."""
        return f"{self._prefix()}{artifact}@{version}"

    def stage_tag(self, artifact: str, stage: str) -> str:
        """The tag of the next move into a stage. Its counter makes two moves at once collide."""
        return f"{self._prefix()}{artifact}#{stage}#{self.counters.get(artifact, 0) + 1}"

    def _prefix(self) -> str:
        return f"{self.folder.rstrip('/')}=" if self.folder else ""


def number(version: str) -> tuple[int, int, int]:
    """``v1.2.3`` as numbers."""
    major, minor, patch = (int(part) for part in version[1:].split("."))
    return major, minor, patch


def is_ours(tag: str) -> bool:
    """Whether a tag is one of a version or a stage."""
    return _TAG.fullmatch(tag) is not None


def check_names(artifact: str, version: str | None, stage: str | None) -> None:
    """Refuses names that GTO would not take."""
    if not re.fullmatch(NAME, artifact):
        raise UsageError(f"--name {artifact}: not a name", "use letters, digits, `-`, `_` and `/`")
    if version is not None and not re.fullmatch(VERSION, version):
        raise UsageError(f"--version {version}: not a version", "write it as v1.2.3")
    if stage is not None and not re.fullmatch(NAME, stage):
        raise UsageError(f"{stage}: not the name of a stage", "use letters, digits, `-`, `_` and `/`")


def read_registry(root: Path) -> Registry:
    """Reads the tags of this clone."""
    registry = Registry(_git.subfolder(root))
    withdrawn: dict[tuple[str, str], int] = {}
    stages = []
    for entry in git(root, "for-each-ref", "refs/tags", f"--format={_FORMAT}").split("\x01"):
        name, kind, tag_object, commit, time, message = (entry.lstrip("\n").split("\0") + [""] * 6)[:6]
        found = _TAG.fullmatch(name)
        if not found or kind != "tag" or (found["folder"] or "") != registry.folder.rstrip("/"):
            continue
        artifact, counter = found["name"], int(found["counter"] or 0)
        registry.counters[artifact] = max(counter, registry.counters.get(artifact, 0))
        registry.newest[artifact] = max(int(time), registry.newest.get(artifact, 0))
        if found["stage"]:
            move = Move(counter, None if found["cancel"] else commit, name, int(time), message.strip())
            stages.append((artifact, found["stage"], move))
        elif found["cancel"]:
            withdrawn[artifact, found["version"]] = int(time)
        elif digest := _DIGEST.search(message):
            version = Version(artifact, found["version"], digest.group(1), commit, name, tag_object)
            registry.versions.setdefault(artifact, []).append(version)
    for artifact, versions in registry.versions.items():
        registry.versions[artifact] = [
            Version(**(vars(one) | {"active": (artifact, one.version) not in withdrawn}))
            for one in sorted(versions, key=lambda one: number(one.version))
        ]
    for artifact, stage, move in sorted(stages, key=lambda row: (row[2].counter, row[2].time)):
        # An assignment names a commit; the version is the one registered there.
        names = {one.commit: one.version for one in registry.versions.get(artifact, [])}
        held = names.get(move.version) if move.version else None
        moves = registry.stages.setdefault(artifact, {}).setdefault(stage, [])
        moves.append(Move(move.counter, held, move.tag, move.time, move.message))
    return registry


def make_tag(root: Path, name: str, commit: str, message: str, after: int) -> str:
    """Writes a tag object, dated later than ``after`` (seconds), under no name yet; returns its id."""
    try:
        who, _, rest = git(root, "var", "GIT_COMMITTER_IDENT").rpartition("> ")
    except PromotionError as error:
        raise PromotionError(
            f"git does not know who makes {name}: {error.message}", "git config user.name and user.email"
        ) from error
    seconds, zone = rest.split(" ")
    head = f"object {commit}\ntype commit\ntag {name}\ntagger {who}> {max(int(seconds), after + 1)} {zone}\n\n"
    return git(root, "mktag", stdin=head + message.rstrip("\n") + "\n")


def publish(root: Path, remote: str | None, tags: Mapping[str, str]) -> None:
    """Gives tag objects their names, all or none, on the git remote, else (without one) in this clone.

    This is the compare-and-swap: names are never forced, so of two at once only one succeeds. Raises PromotionError
    when somebody else took a name, or git refuses.
    """
    if remote is None:
        _git.create_tags(root, tags)
        return
    complaint = _git.push_tags(root, remote, tags)
    if not complaint:
        return
    there = _git.remote_tags(root, remote)
    if all(there.get(name) == value for name, value in tags.items()):
        return  # the answer was lost, not the push
    if taken := [name for name in tags if name in there]:
        raise PromotionError(
            f"{', '.join(taken)}: somebody else registered this at the same moment; nothing of yours was registered",
            "`git fetch --tags && enginegate list` shows what they did; run the command again if it should follow",
        )
    raise PromotionError(f"git push {remote}: {complaint}", "the remote must let you push tags, several at once")
