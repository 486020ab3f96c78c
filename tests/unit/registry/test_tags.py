"""Tags are read as GTO reads them, and stages as their counters say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gto.tag
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import PromotionError, UsageError
from pipeline.registry.tags import _TAG, check_names, make_tag, number, publish, read_registry

DIGEST = "sha256:" + 64 * "a"
part = st.from_regex(r"[a-zA-Z0-9_-]{1,6}", fullmatch=True)


@given(
    st.one_of(
        st.text(alphabet="abv019.-_/#@!=", max_size=24),
        st.builds("{}@v{}.{}.{}{}".format, part, *3 * [st.integers(0, 30)], st.sampled_from(["", "!", "#1", "!#2"])),
        st.builds("{}#{}{}#{}".format, part, part, st.sampled_from(["", "!"]), st.integers(0, 99)),
        st.builds("{}={}#{}#{}".format, part, part, part, st.integers(0, 99)),
    )
)
def test_the_grammar_is_that_of_gto(name: str) -> None:
    """Whatever we take for a version or a stage, GTO takes for the same; pre-releases are left to GTO alone."""
    found, theirs = _TAG.fullmatch(name), gto.tag.parse_name(name, raise_on_fail=False)
    if not found:
        odd = "-" in theirs.get("version", "") or "+" in theirs.get("version", "")
        assert not theirs or odd or theirs["action"].value in ("create", "deprecate")
        return
    folder = f"{found['folder']}:" if found["folder"] else ""
    assert theirs["name"] == f"{folder}{found['name']}"
    assert theirs.get("version") == found["version"]
    assert theirs.get("stage") == found["stage"]
    assert theirs.get("counter") == (int(found["counter"]) if found["counter"] else None)
    assert theirs["action"].value.startswith(("de", "un")) == bool(found["cancel"])


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "A User")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "a@b.c")
    run(tmp_path, "git", "init", "-q", "-b", "main")
    commit(tmp_path, 0)
    return tmp_path


def run(folder: Path, *command: str) -> str:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def commit(folder: Path, place: int) -> str:
    run(folder, "git", "commit", "-q", "--allow-empty", "-m", str(place))
    return run(folder, "git", "rev-parse", "HEAD")


def register(folder: Path, version: str, digest: str = DIGEST) -> str:
    """A version on a commit of its own; returns the commit."""
    made = commit(folder, number(version)[2])
    after = read_registry(folder).newest.get("shop", 0)
    tag = f"shop@{version}"
    publish(folder, None, {tag: make_tag(folder, tag, made, f"x\n\nengine-digest: {digest}", after)})
    return made


def assign(folder: Path, stage: str, made: str) -> None:
    registry = read_registry(folder)
    tag = registry.stage_tag("shop", stage)
    publish(folder, None, {tag: make_tag(folder, tag, made, "moved", registry.newest["shop"])})


def gto_says(folder: Path) -> dict[str, list[str]]:
    rows = json.loads(run(folder, str(Path(sys.executable).with_name("gto")), "show", "shop", "--json"))
    return {row["version"]: [stage["stage"] for stage in row["stages"]] for row in rows}


def test_a_stage_moves_with_its_counter_and_gto_agrees(repository: Path) -> None:
    """Ten moves within a second: a clock or an alphabetical order would get some wrong."""
    commits = {version: register(repository, version) for version in ("v0.0.1", "v0.0.2", "v0.0.10")}
    order = ["v0.0.1", "v0.0.2", "v0.0.10", "v0.0.2", "v0.0.1", "v0.0.10"] * 2
    for version in order:
        assign(repository, "production", commits[version])
    registry = read_registry(repository)
    assert [move.version for move in registry.stages["shop"]["production"]] == order
    assert registry.in_stage("shop", "production") == "v0.0.10"
    assert [one.version for one in registry.versions["shop"]] == ["v0.0.1", "v0.0.2", "v0.0.10"]
    assert registry.next_version("shop") == "v0.0.11"
    assert gto_says(repository) == {"v0.0.1": [], "v0.0.2": [], "v0.0.10": ["production"]}


def test_a_clock_that_goes_slow(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A move from a machine whose clock is a day behind counts, for GTO too."""
    commits = {version: register(repository, version) for version in ("v0.0.1", "v0.0.2")}
    assign(repository, "production", commits["v0.0.2"])
    monkeypatch.setenv("GIT_COMMITTER_DATE", "2020-01-01T00:00:00Z")
    assign(repository, "production", commits["v0.0.1"])
    assert read_registry(repository).in_stage("shop", "production") == "v0.0.1"
    assert gto_says(repository)["v0.0.1"] == ["production"]


def test_what_gto_writes_is_read(repository: Path) -> None:
    register(repository, "v0.0.1")
    command = str(Path(sys.executable).with_name("gto"))
    run(repository, command, "assign", "shop", "--version", "v0.0.1", "--stage", "dev")
    assert read_registry(repository).in_stage("shop", "dev") == "v0.0.1"
    run(repository, command, "deprecate", "shop", "v0.0.1", "dev")
    assert read_registry(repository).in_stage("shop", "dev") is None
    run(repository, command, "deprecate", "shop", "v0.0.1")
    registry = read_registry(repository)
    assert (registry.active("shop"), registry.with_digest("shop", DIGEST)) == ([], None)
    assert registry.next_version("shop") == "v0.0.2"  # a number is used once


def test_other_tags_are_left_alone(repository: Path) -> None:
    run(repository, "git", "tag", "shop@v0.0.1")  # lightweight
    run(repository, "git", "tag", "-am", "no digest", "shop@v0.0.2")
    run(repository, "git", "tag", "-am", f"engine-digest: {DIGEST}", "ml=shop@v0.0.3")  # of a subfolder's project
    run(repository, "git", "tag", "-am", "release", "v1.0")
    assert read_registry(repository).versions == {}


def test_a_name_that_is_taken(repository: Path) -> None:
    register(repository, "v0.0.1")
    with pytest.raises(PromotionError):
        register(repository, "v0.0.1", "sha256:" + 64 * "b")
    assert read_registry(repository).versions["shop"][0].digest == DIGEST


def test_nobody_to_sign_for_a_tag(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_COMMITTER_NAME", "")
    with pytest.raises(PromotionError, match="git does not know who") as caught:
        make_tag(repository, "shop@v0.0.1", run(repository, "git", "rev-parse", "HEAD"), "x", 0)
    assert "user.name" in caught.value.next_step


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (("-a", None, None), "not a name"),
        (("a", "1.2.3", None), "not a version"),
        (("a", "v1.2", None), "not a version"),
        (("a", "v1.2.3-rc1", None), "not a version"),
        (("a", None, "a b"), "not the name of a stage"),
    ],
)
def test_names(names: tuple[str, str | None, str | None], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        check_names(*names)
