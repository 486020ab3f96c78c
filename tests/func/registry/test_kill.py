"""kill -9 between any two steps, and within the upload: no version without its bytes; the next run completes."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.cli import main
from pipeline.registry import steps
from pipeline.registry.pull import pull
from pipeline.registry.steps import STEPS, Plan
from pipeline.registry.store import Store
from tests.func.registry.conftest import ARTIFACT, FAMILY, clone, shell

PROMOTE = ["promote", "int8_mixed", "--stage", "staging"]
SHARE = STEPS.index(steps.share)


def killed_at(prepare: Callable[[], None]) -> None:
    """Promotes in a process of its own, which must die of SIGKILL where ``prepare`` arranges it."""

    def child() -> None:
        prepare()
        os._exit(main(PROMOTE))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def registered(shared: Path) -> list[str]:
    """Every version that the git remote has, each read from the store with nothing but hashlib."""
    remote = shared / "Shop.Translator.git"
    tags = shell(remote, "git", "tag").split()
    versions = [tag for tag in tags if "@" in tag]
    for tag in versions:
        manifest = json.loads(shell(remote, "git", "show", f"{tag}:registry/{ARTIFACT}/manifest.json"))
        for name, one in manifest["registration"]["objects"].items():
            content = (shared / "store/files/md5" / one["md5"][:2] / one["md5"][2:]).read_bytes()
            assert f"sha256:{hashlib.sha256(content).hexdigest()}" == manifest["files"][name], name
    return tags


def the_next_run_completes(shared: Path) -> None:
    assert main(PROMOTE) == 0
    assert registered(shared) == [f"{ARTIFACT}#staging#1", f"{ARTIFACT}@v0.0.1"]
    assert shell(Path(), "git", "tag").split() == [f"{ARTIFACT}#staging#1", f"{ARTIFACT}@v0.0.1"]
    found = pull(clone(shared, "serving"), f"{FAMILY}#staging")
    assert (found.folder / "model.onnx.data").read_bytes() == b"int8_mixed"


@pytest.mark.parametrize("place", range(len(STEPS) + 1), ids=[*(f"before_{one.__name__}" for one in STEPS), "after"])
def test_between_two_steps(shared: Path, place: int) -> None:
    def prepare() -> None:
        steps.STEPS = (*STEPS[:place], die, *STEPS[place:])

    killed_at(prepare)
    assert bool(registered(shared)) == (place > SHARE)  # nothing is seen before everything is there
    the_next_run_completes(shared)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4])
def test_within_the_upload(shared: Path, count: int) -> None:
    """After ``count`` of the five objects (three files, the manifest, DVC's listing)."""
    put = Store.put

    def prepare() -> None:
        left = [count]

        def counted(store: Store, file: Path, md5: str) -> None:
            if not left[0]:
                die()
            left[0] -= 1
            put(store, file, md5)

        Store.put = counted  # type: ignore[method-assign]

    killed_at(prepare)
    stored = [path for path in (shared / "store").rglob("*") if path.is_file()] if (shared / "store").exists() else []
    assert len(stored) == count
    assert registered(shared) == []
    the_next_run_completes(shared)


def test_a_version_that_never_reached_the_remote_is_shared_by_the_next_run(shared: Path) -> None:
    """Registered while there was no git remote: the tag is here, and goes out as it is."""
    shell(Path(), "git", "remote", "rename", "origin", "elsewhere")
    shell(Path(), "git", "remote", "remove", "elsewhere")
    assert main(["promote", "--name", FAMILY]) == 0
    here = shell(Path(), "git", "rev-parse", f"{ARTIFACT}@v0.0.1")
    shell(Path(), "git", "remote", "add", "origin", "../Shop.Translator.git")
    assert registered(shared) == []
    the_next_run_completes(shared)
    assert shell(shared / "Shop.Translator.git", "git", "rev-parse", f"{ARTIFACT}@v0.0.1") == here


def test_the_steps_are_done_in_this_order() -> None:
    """The kill tests drive this list: bytes, verification, objects without a name, names, this clone."""
    assert [step.__name__ for step in STEPS] == ["upload", "confirm", "record", "share", "adopt", "mirror"]
    assert all(step.__annotations__["plan"] in (Plan, "Plan") for step in STEPS)
