from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pipeline.engines.manifest import FILE
from pipeline.errors import InputError, IntegrityError
from pipeline.files import digest_file, digest_json, read_json, write_json
from pipeline.registry.promoted import promote_engine, promoted_recipes, recover, verify_promoted
from tests.func.registry.conftest import POLICY, verdict_of, write_engine

RECIPE = "int8_mixed"


class Project:
    """An engine, its verdict and the promoted folder."""

    def __init__(self, root: Path) -> None:
        self.engine, self.verdict, self.target = root / "engine", root / "verdict.json", root / "promoted"
        self.build(b"weights")

    def build(self, weights: bytes, word: str = "PROMOTE") -> str:
        digest = write_engine(self.engine, RECIPE, weights)
        write_json(self.verdict, verdict_of(RECIPE, digest, word))
        return digest

    def promote(self) -> str:
        return promote_engine(RECIPE, self.verdict, self.engine, self.target).word

    def digest(self) -> str:
        return str(verify_promoted(self.target / RECIPE)["digest"])


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_the_engine_is_copied_with_its_verdict(project: Project) -> None:
    assert project.promote() == "promoted"
    manifest = verify_promoted(project.target / RECIPE)
    section = manifest["gate"]
    assert manifest["digest"] == read_json(project.engine / FILE)["digest"]
    assert section["file_digest"] == digest_file(project.verdict)
    assert section["policy_digest"] == POLICY.digest()
    assert section["metrics"][0]["lower"] == -0.5
    assert section["metrics"][0]["n"] == 640
    assert section["attempt"] == 1
    assert section["ledger_entry"]["items"] == 640
    assert "gate" not in read_json(project.engine / FILE)  # the engine itself is a dependency and stays as it is
    assert promoted_recipes(project.target) == [RECIPE]


def test_the_same_again_changes_nothing(project: Project) -> None:
    project.promote()
    before = {path: path.stat().st_mtime_ns for path in project.target.rglob("*")}
    assert project.promote() == "unchanged"
    assert {path: path.stat().st_mtime_ns for path in project.target.rglob("*")} == before


@pytest.mark.parametrize("word", ["REJECT", "INCONCLUSIVE", "INVALID"])
def test_no_other_verdict_promotes(project: Project, word: str) -> None:
    project.build(b"weights", word)
    assert project.promote() == "none"
    assert not (project.target / RECIPE).exists()


def test_after_a_refusal_the_last_good_engine_stays(project: Project) -> None:
    good = project.build(b"good")
    project.promote()
    project.build(b"bad", "REJECT")
    kept = promote_engine(RECIPE, project.verdict, project.engine, project.target)
    assert (kept.word, kept.digest) == ("kept", good)
    assert "promoted earlier, stays" in kept.note
    assert project.digest() == good


def test_the_very_engine_is_refused_later(project: Project) -> None:
    digest = project.build(b"weights")
    project.promote()
    write_json(project.verdict, verdict_of(RECIPE, digest, "REJECT"))
    assert "promoted by an earlier verdict" in note(project) or "an earlier verdict promoted" in note(project)


def note(project: Project) -> str:
    return promote_engine(RECIPE, project.verdict, project.engine, project.target).note


def test_a_better_engine_takes_its_place(project: Project) -> None:
    project.promote()
    better = project.build(b"better")
    assert project.promote() == "promoted"
    assert project.digest() == better
    assert [path.name for path in project.target.iterdir()] == [RECIPE]


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data", "tokenizer/tokenizer.json"])
def test_bytes_that_were_not_judged(project: Project, name: str) -> None:
    (project.engine / name).write_bytes(b"other")
    with pytest.raises(IntegrityError, match=name):
        project.promote()
    assert list(project.target.iterdir()) == []


def test_another_engine_than_was_judged(project: Project) -> None:
    write_json(project.verdict, verdict_of(RECIPE, digest_json("other")))
    with pytest.raises(IntegrityError, match=f"judged {digest_json('other')}"):
        project.promote()
    assert list(project.target.iterdir()) == []


def test_the_verdict_of_another_recipe(project: Project) -> None:
    write_json(project.verdict, verdict_of("int8_sq", project.build(b"weights")))
    with pytest.raises(IntegrityError, match="the verdict of int8_sq"):
        project.promote()


def test_no_verdict(project: Project) -> None:
    project.verdict.unlink()
    with pytest.raises(InputError, match="no such file"):
        project.promote()


def test_a_damaged_copy_is_made_again(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    project.promote()
    (project.target / RECIPE / "model.onnx").write_bytes(b"damaged")
    assert project.promote() == "promoted"
    assert "copied again" in capsys.readouterr().out
    project.digest()


def test_a_damaged_copy_that_cannot_be_replaced_is_an_error(project: Project) -> None:
    """Else DVC would take the damage for the new output."""
    project.promote()
    (project.target / RECIPE / "model.onnx").write_bytes(b"damaged")
    project.build(b"bad", "REJECT")
    with pytest.raises(IntegrityError, match=r"model\.onnx"):
        project.promote()


def test_killed_between_the_two_renames(project: Project) -> None:
    project.promote()
    good = project.digest()
    (project.target / RECIPE).replace(project.target / f".{RECIPE}.ab12cd.old")
    shutil.copytree(project.engine, project.target / f".{RECIPE}.ab12cd.part")
    recover(project.target)
    assert [path.name for path in project.target.iterdir()] == [RECIPE]
    assert project.digest() == good


def test_killed_while_copying(project: Project) -> None:
    project.promote()
    (project.target / f".{RECIPE}.x.part").mkdir()
    (project.target / f".{RECIPE}.x.part/model.onnx").write_bytes(b"half")
    recover(project.target)
    assert [path.name for path in project.target.iterdir()] == [RECIPE]


def test_killed_before_the_old_one_was_removed(project: Project) -> None:
    project.promote()
    shutil.copytree(project.target / RECIPE, project.target / f".{RECIPE}.x.old")
    recover(project.target)
    assert [path.name for path in project.target.iterdir()] == [RECIPE]


def test_verify_wants_a_verdict(project: Project) -> None:
    with pytest.raises(IntegrityError, match="holds no verdict"):
        verify_promoted(project.engine)


def test_measured_service_levels_go_with_the_engine(project: Project) -> None:
    measured = {"level": "speed-first", "outcome": "met", "value": 4.2, "limit": "below 5", "unit": "ms"}
    absent = {"level": "cost-efficiency", "outcome": "absent", "value": None}
    verdict = read_json(project.verdict) | {"service": {"baseline": [absent], "candidate": [measured, absent]}}
    write_json(project.verdict, verdict)
    project.promote()
    manifest = verify_promoted(project.target / RECIPE)
    assert manifest["performance"] == {"baseline": [], "candidate": [measured]}


def test_without_measurements_there_is_no_performance(project: Project) -> None:
    write_json(project.verdict, read_json(project.verdict) | {"service": {"baseline": [], "candidate": []}})
    project.promote()
    assert "performance" not in verify_promoted(project.target / RECIPE)
