"""Two clones that promote or move a stage at the same moment: one wins, the other writes nothing and says so."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from pipeline.cli import main
from pipeline.errors import PromotionError
from pipeline.files import read_json
from pipeline.registry import rollback, steps
from pipeline.registry.lock import one_at_a_time
from pipeline.registry.promote import promote
from tests.func.registry.conftest import ARTIFACT, commit, reproduce, shell, write_engine, write_verdict

VERSION = f"{ARTIFACT}@v0.0.1"


def second_clone(shared: Path, weights: bytes | None) -> Path:
    """Another machine's clone with the same run, or (``weights``) with a run of its own."""
    other = shared / "second"
    shutil.copytree(shared / "Shop.Translator", other, symlinks=True)
    if weights is not None:
        write_verdict(other, "int8_mixed", write_engine(other / "engines/int8_mixed", "int8_mixed", weights))
        reproduce(other)
        commit(other)
    return other


def at_once(shared: Path, *calls: tuple[Path, list[str]]) -> list[int]:
    """Runs a command in each folder, in processes of their own that meet right before they publish."""
    context = multiprocessing.get_context("fork")
    meet = context.Barrier(len(calls))

    def child(folder: Path, arguments: list[str], gate: Barrier) -> None:
        publish = steps.publish

        def together(*parts: object) -> None:
            gate.wait(60)
            publish(*parts)  # type: ignore[arg-type]

        steps.publish = together  # type: ignore[assignment]
        rollback.publish = together  # type: ignore[assignment]
        os.chdir(folder)
        os.environ["GIT_COMMITTER_NAME"] = folder.name  # else the same second makes the same tag, which is no conflict
        with (shared / f"{folder.name}.err").open("w", buffering=1) as sys.stderr:
            os._exit(main(arguments))

    processes = [context.Process(target=child, args=(*call, meet)) for call in calls]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert all(process.exitcode is not None for process in processes)
    return [int(process.exitcode or 0) for process in processes]


@pytest.mark.parametrize("weights", [b"theirs", None], ids=["different_engines", "the_same_engine"])
def test_two_promotions_at_once(shared: Path, weights: bytes | None) -> None:
    first, second = shared / "Shop.Translator", second_clone(shared, weights)
    codes = at_once(shared, (first, ["promote"]), (second, ["promote"]))
    assert sorted(codes) == [0, PromotionError.exit_code]
    winner, loser = (first, second) if codes[0] == 0 else (second, first)
    message = (shared / f"{loser.name}.err").read_text()
    assert "somebody else registered this at the same moment; nothing of yours was registered" in message
    remote = shared / "Shop.Translator.git"
    assert shell(remote, "git", "tag").split() == [VERSION]
    assert shell(remote, "git", "rev-parse", VERSION) == shell(winner, "git", "rev-parse", VERSION)
    assert shell(loser, "git", "tag").split() == []

    # The loser looks again: its own engine follows as the next version, the same engine is there already.
    done = promote(loser)[0][0]
    if weights is None:
        assert (done.action, done.version) == ("already", "v0.0.1")
    else:
        assert (done.action, done.version) == ("registered", "v0.0.2")
        assert done.digest == read_json(loser / "engines/promoted/int8_mixed/manifest.json")["digest"]
    assert shell(loser, "git", "rev-parse", VERSION) == shell(winner, "git", "rev-parse", VERSION)


def test_two_moves_of_a_stage_at_once(shared: Path) -> None:
    first, second = shared / "Shop.Translator", second_clone(shared, b"better")
    promote(first, stage="production")
    promote(second, stage="production")
    promote(first)  # has both versions now
    codes = at_once(
        shared,
        (first, ["rollback", f"{ARTIFACT}#production"]),
        (second, ["rollback", f"{ARTIFACT}#production", "--to", "v0.0.1"]),
    )
    assert sorted(codes) == [0, PromotionError.exit_code]
    moves = [tag for tag in shell(shared / "Shop.Translator.git", "git", "tag").split() if "#production#" in tag]
    assert moves == [f"{ARTIFACT}#production#{number}" for number in (1, 2, 3)]


def test_one_command_at_a_time_in_one_clone(shared: Path) -> None:
    with one_at_a_time(Path()), pytest.raises(PromotionError, match="another command is changing the registry"):
        promote(Path())
    assert promote(shared / "Shop.Translator")[0][0].action == "registered"


def test_a_tag_that_was_moved_on_the_remote(shared: Path) -> None:
    """Whoever moves a published version is found out by every clone that knows the old one."""
    promote(Path())
    other = second_clone(shared, None)
    shell(other, "git", "tag", "-fam", "forged", VERSION)
    shell(other, "git", "push", "-q", "--force", "origin", VERSION)
    assert main(["list"]) == 69
    assert main(["promote"]) == 69


def test_a_remote_that_does_not_answer(shared: Path) -> None:
    (shared / "Shop.Translator.git").rename(shared / "gone.git")
    assert main(["promote"]) == 69
    assert shell(Path(), "git", "tag") == ""


def test_a_remote_that_refuses_tags(shared: Path) -> None:
    hook = shared / "Shop.Translator.git/hooks/pre-receive"
    hook.write_text("#!/bin/sh\necho no tags here >&2\nexit 1\n")
    hook.chmod(0o755)
    with pytest.raises(PromotionError, match="no tags here"):
        promote(Path(), stage="production")
    assert shell(Path(), "git", "tag") == ""
    hook.unlink()
    assert promote(Path(), stage="production")[0][0].action == "registered"


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("lost", [True, False])
def test_a_lost_answer_is_not_a_lost_race(lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection may break after the remote took the tags, or before."""
    from pipeline.registry import git

    push = git.push_tags

    def broken(*parts: object) -> str:
        return (push(*parts) if lost else "") or "the connection broke"  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(git, "push_tags", broken)
        if lost:
            assert promote(Path())[0][0].action == "registered"
            return
        with pytest.raises(PromotionError, match="the connection broke"):
            promote(Path())
    assert promote(Path())[0][0].version == "v0.0.1"
