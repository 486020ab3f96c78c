"""What people do with a registry: look, compare, roll back, clean up, serve."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli import build_parser, main
from pipeline.commands.serve import engine_folder
from pipeline.errors import IntegrityError, PromotionError, UsageError
from pipeline.files import read_json
from pipeline.registry.gc import Garbage, collect
from pipeline.registry.promote import promote
from pipeline.registry.pull import pull
from pipeline.registry.rollback import rollback
from tests.func.registry.conftest import ARTIFACT, FAMILY, clone, dvc, reproduce, run_again, shell
from tests.light import check_help

COMMANDS = ("diff", "gc", "list", "promote", "pull", "rollback", "serve", "show", "verify")


@pytest.fixture
def history(shared: Path) -> Path:
    """v0.0.1, v0.0.2 and v0.0.3 went to production one after the other; returns the project."""
    project = shared / "Shop.Translator"
    promote(project, stage="production")
    for weights in (b"better", b"best"):
        run_again(project, weights)
        promote(project, stage="production")
    return project


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_light_and_has_an_example(command: str) -> None:
    check_help(command)


def test_the_list(history: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.chdir(history)
    assert main(["list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["version"], row["stages"]) for row in rows] == [
        ("v0.0.3", ["production"]),
        ("v0.0.2", []),
        ("v0.0.1", []),
    ]
    assert {(row["family"], row["recipe"], row["backend"]) for row in rows} == {(FAMILY, "int8_mixed", "onnxruntime")}
    assert rows[0]["metrics"][0] == {
        **{"name": "bleu", "slice": "all", "n": 640},
        **{"difference": -0.1, "lower": -0.5, "upper": 0.3},
    }
    assert main(["list", FAMILY]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["artifact", "version", "stages"]
    assert lines[1].split()[:3] == [ARTIFACT, "v0.0.3", "production"]
    assert main(["list", "other"]) == 0
    assert capsys.readouterr().out == "nothing is registered as other\n"


def test_a_registered_version_is_shown(history: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.chdir(history)
    assert main(["show", f"{FAMILY}#production"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{ARTIFACT}@v0.0.3\n")
    assert "bleu on all loses at most 0.5" in out
    assert "production: v0.0.2 -> v0.0.3" in out
    assert main(["show", f"{FAMILY}@v0.0.1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["version"], found["signed"]) == ("v0.0.1", False)
    assert [move["version"] for move in found["stages"]["production"]] == ["v0.0.1", "v0.0.2", "v0.0.3"]
    assert found["manifest"]["registration"]["version"] == "v0.0.1"
    assert main(["show", "int8_mixed"]) == 0  # a recipe comes before a reference
    assert "engine int8_mixed" in capsys.readouterr().out
    assert main(["show", f"{FAMILY}@v0.0.1", "--trtexec"]) == UsageError.exit_code  # there are no files of it here
    assert "pull" in capsys.readouterr().err
    assert main(["show", "nothing"]) == UsageError.exit_code
    err = capsys.readouterr().err
    assert "nothing: neither an engine nor a verdict; nothing: not registered" in err
    assert ARTIFACT in err


def test_back_and_back_again(history: Path) -> None:
    stage = f"{FAMILY}#production"
    with pytest.raises(PromotionError, match="holds v0.0.3 already"):
        rollback(history, stage, to="v0.0.3")
    assert (rollback(history, stage, dry_run=True).before, rollback(history, stage, dry_run=True).after) == (
        *("v0.0.3", "v0.0.2"),
    )
    for after in ("v0.0.2", "v0.0.1"):  # never forwards again to what was left
        assert rollback(history, stage).after == after
        assert pull(history, stage).version == after
    with pytest.raises(PromotionError, match="held no earlier version"):
        rollback(history, stage)
    assert rollback(history, stage, to="v0.0.3").after == "v0.0.3"
    # Everybody sees it, with its history.
    other = clone(history.parent, "other")
    assert pull(other, stage).version == "v0.0.3"
    tags = [tag for tag in shell(other, "git", "tag").split() if "#" in tag]
    assert len(tags) == 6
    # From staging to production is the same command.
    assert rollback(history, f"{FAMILY}#canary", to="v0.0.2").before is None
    assert pull(other, f"{FAMILY}#canary").version == "v0.0.2"


def test_what_no_stage_is_moved_to(history: Path) -> None:
    stage = f"{FAMILY}#production"
    for text, to, says in (
        (FAMILY, None, "names no stage"),
        (f"{FAMILY}#nothing", None, "no such stage"),
        (stage, "0.0.1", "not a version"),
    ):
        with pytest.raises(UsageError, match=says):
            rollback(history, text, to=to)
    with pytest.raises(PromotionError, match="not registered"):
        rollback(history, stage, to="v9.0.0")
    shell(history, "git", "tag", "-am", "withdrawn", f"{ARTIFACT}@v0.0.2!")
    with pytest.raises(PromotionError, match="withdrawn"):
        rollback(history, stage, to="v0.0.2")
    assert rollback(history, stage, dry_run=True).after == "v0.0.1"  # over the withdrawn one
    md5 = hashlib.md5(b"int8_mixed").hexdigest()
    (history.parent / "store/files/md5" / md5[:2] / md5[2:]).unlink()
    with pytest.raises(IntegrityError, match=r"lacks model\.onnx\.data"):
        rollback(history, stage)


def test_a_withdrawn_version_is_not_pulled(history: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.chdir(history)
    shell(history, "git", "tag", "-am", "withdrawn", f"{ARTIFACT}@v0.0.3!")
    for reference in (f"{FAMILY}#production", f"{FAMILY}@v0.0.3"):
        assert main(["pull", reference]) == PromotionError.exit_code
    assert "rollback" in capsys.readouterr().err
    assert pull(history, FAMILY).version == "v0.0.2"
    assert main(["list"]) == 0
    assert "v0.0.3*" in capsys.readouterr().out


def test_two_engines_side_by_side(history: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.chdir(history)
    one, two = f"{FAMILY}@v0.0.1", f"{FAMILY}@v0.0.2"
    assert main(["diff", one, two, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["files"]) == ["model.onnx.data"]
    assert found["identity"]["digest"][1] == read_json(pull(history, two).folder / "manifest.json")["digest"]
    assert found["metrics"][0]["sides"][0]["lower"] == -0.5
    assert list(found["sections"]) == ["provenance"]
    assert main(["diff", one, two]) == 0
    out = capsys.readouterr().out
    assert "model.onnx.data" in out
    assert "metrics (difference to the FP16 baseline, points)" in out
    assert main(["diff", one, one]) == 0
    assert "model.onnx.data" not in capsys.readouterr().out
    assert main(["diff", one, "engines"]) == UsageError.exit_code


def test_the_recipes_are_compared(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    project = shared / "Shop.Translator"
    (project / "recipes").mkdir()
    for weights, alpha in ((b"first", 0.5), (b"second", 0.8)):
        (project / "recipes/int8_mixed.yaml").write_text(f"algorithm: smoothquant\nalpha: {alpha}\n", encoding="utf-8")
        run_again(project, weights)
        promote(project)
    assert main(["diff", f"{FAMILY}@v0.0.1", f"{FAMILY}@v0.0.2"]) == 0
    out = capsys.readouterr().out
    assert "  -alpha: 0.5\n  +alpha: 0.8" in out


def store_files(shared: Path) -> set[str]:
    return {path.read_bytes().decode() for path in (shared / "store").rglob("*") if path.is_file()}


BUILD = """\
  build:
    cmd: mkdir -p engines/made && cp weights engines/made/plan
    deps: [weights]
    outs: [engines/made]
  notes:
    cmd: cp text notes
    deps: [text]
    outs: [notes]
"""


def build(project: Path, weights: str, text: str = "text") -> None:
    """Runs two more stages: an engine that nobody judged, and an output that is no engine."""
    (project / "weights").write_text(weights, encoding="utf-8")
    (project / "text").write_text(text, encoding="utf-8")
    reproduce(project)


def objects(garbage: list[Garbage]) -> list[set[str]]:
    return [set(one.objects) for one in garbage]


def md5(text: str) -> str:
    return hashlib.md5(text.encode()).hexdigest()


def test_garbage(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of all engines that were ever built, those registered and the present one stay."""
    project = shared / "Shop.Translator"
    with (project / "dvc.yaml").open("a", encoding="utf-8") as file:
        file.write(BUILD)
    (project / ".gitignore").open("a").write("/notes\n")
    build(project, "earlier plan", "earlier notes")
    run_again(project, b"registered")
    promote(project)
    build(project, "plan that is also notes", "plan that is also notes")
    run_again(project, b"never registered")
    dvc(project, "push", "-q")
    shell(project, "git", "branch", "experiment")
    build(project, "present plan", "present notes")
    run_again(project, b"present")
    build(project, "uncommitted plan")  # known from DVC's run cache alone
    shell(project, "git", "checkout", "-q", ".")
    dvc(project, "checkout", "-q", "--force")

    # A branch keeps what it names.
    assert md5("never registered") not in objects(collect(project))[0]
    shell(project, "git", "checkout", "-q", "experiment")
    shell(project, "git", "commit", "-q", "--allow-empty", "-m", "gone on")
    shell(project, "git", "checkout", "-q", "main")
    shell(project, "git", "branch", "-qD", "experiment")

    capsys.readouterr()
    assert main(["gc", "--remote", "store", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    cache, remote = (set(store["objects"]) for store in found["stores"])
    assert not found["deleted"]
    assert md5("never registered") in remote
    assert {md5("earlier plan"), md5("never registered"), md5("uncommitted plan")} <= cache
    kept = {md5(text) for text in ("registered", "present", "present plan", "plan that is also notes", "graph", "{}")}
    assert not kept & (cache | remote)
    assert not {md5("earlier notes"), md5("present notes")} & (cache | remote)

    there = {path for path in (shared / "store").rglob("*") if path.is_file()}
    assert main(["gc", "--remote", "store", "--delete"]) == 0
    assert "freed" in capsys.readouterr().out
    left = {path for path in (shared / "store").rglob("*") if path.is_file()}
    assert {path.parent.name + path.name for path in there - left} == remote
    # What was registered and the present state have every byte; a second run finds nothing.
    assert main(["verify", FAMILY]) == 0
    dvc(project, "checkout", "-q")
    assert objects(collect(project, remote="store")) == [set(), set()]


def serve_arguments(*arguments: str) -> Any:
    return build_parser().parse_args(["serve", *arguments])


def test_serve_takes_a_reference(history: Path) -> None:
    os.chdir(history)
    found = engine_folder(serve_arguments(f"{FAMILY}#production"))
    assert found == Path(f"engines/pulled/{ARTIFACT}@v0.0.3")
    assert (found / "model.onnx.data").read_bytes() == b"best"
    assert engine_folder(serve_arguments("engines/int8_mixed")) == Path("engines/int8_mixed")
    assert engine_folder(serve_arguments("no/folder")) == Path("no/folder")
    with pytest.raises(UsageError, match="not registered"):
        engine_folder(serve_arguments("int8_typo"))
    with pytest.raises(IntegrityError, match="is not signed"):
        engine_folder(serve_arguments(str(found), "--key", "any.pub"))
