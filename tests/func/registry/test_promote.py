"""The story of a promotion, and everything that must stop one, on real git, DVC and GTO."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pipeline.cli import main
from pipeline.engines.manifest import FILE
from pipeline.errors import InputError, IntegrityError, PromotionError, UsageError
from pipeline.files import digest_json, read_json, write_json
from pipeline.registry.promote import promote
from tests.func.registry.conftest import commit, dvc, shell, write_engine, write_verdict

ENGINE = "engines/promoted/int8_mixed"
FILES = ("model.onnx", "model.onnx.data", "tokenizer/tokenizer.json", FILE)


def tags(project: Path) -> list[str]:
    return shell(project, "git", "tag").split()


def test_story(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["promote", "--dry-run"]) == 0
    assert tags(project) == []
    assert main(["promote"]) == 0
    assert tags(project) == ["shop-translator-int8_mixed@v0.0.1"]
    message = shell(project, "git", "tag", "-n99", "--format=%(contents)")
    digest = read_json(project / ENGINE / FILE)["digest"]
    assert f"engine-digest: {digest}" in message
    assert "policy-digest: sha256:policy" in message
    assert "bleu on all loses at most 0.5" in message

    capsys.readouterr()
    (project / "other.txt").write_text("later", encoding="utf-8")
    commit(project)
    assert main(["promote", "int8_mixed", "--version", "v3.0.0"]) == 0  # the same engine on a later commit
    assert "already registered as v0.0.1" in capsys.readouterr().out

    # A better engine passes: the next version. Then a worse one is refused: the good one stays.
    better = write_engine(project / "engines/int8_mixed", "int8_mixed", b"better")
    write_verdict(project, "int8_mixed", better)
    dvc(project, "repro", "-q")
    commit(project)
    assert main(["promote", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)["promotions"][0]
    assert (row["version"], row["digest"], row["action"]) == ("v0.0.2", better, "registered")
    worse = write_engine(project / "engines/int8_mixed", "int8_mixed", b"worse")
    write_verdict(project, "int8_mixed", worse, "REJECT")
    assert "int8_mixed: kept (REJECT; " in dvc(project, "repro")
    assert read_json(project / ENGINE / FILE)["digest"] == better
    commit(project)
    assert main(["promote"]) == 0
    assert "already registered as v0.0.2" in capsys.readouterr().out

    # Others get exactly these bytes by the tag.
    dvc(project, "get", ".", ENGINE, "--rev", "shop-translator-int8_mixed@v0.0.1", "-o", "first")
    assert (project / "first/model.onnx.data").read_bytes() == b"int8_mixed"


def test_a_deregistered_version_counts_no_more(project: Path) -> None:
    promote(project)
    shell(project, "git", "tag", "-a", "shop-translator-int8_mixed@v0.0.1!", "-m", "withdrawn")
    commit_later(project)
    done, _ = promote(project)
    assert (done[0].action, done[0].version) == ("registered", "v0.0.2")


def commit_later(project: Path) -> None:
    (project / "later.txt").write_text("x", encoding="utf-8")
    commit(project)


@pytest.mark.parametrize("name", FILES)
def test_one_tampered_byte(project: Path, name: str) -> None:
    file = project / ENGINE / name
    content = bytearray(file.read_bytes())
    for place in {0, len(content) // 2, len(content) - 1}:
        changed = bytearray(content)
        changed[place] ^= 1
        file.write_bytes(changed)
        with pytest.raises((IntegrityError, InputError), match="engines/promoted"):  # or the JSON no longer parses
            promote(project)
    assert tags(project) == []


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file(project: Path, name: str) -> None:
    (project / ENGINE / name).unlink()
    with pytest.raises(InputError if name == FILE else IntegrityError, match=name):
        promote(project)


def test_a_foreign_file(project: Path) -> None:
    (project / ENGINE / "extra.bin").write_bytes(b"x")
    with pytest.raises(IntegrityError, match=r"extra\.bin: not in the manifest"):
        promote(project)


def test_a_number_changed_in_the_verdict(project: Path) -> None:
    manifest = read_json(project / ENGINE / FILE)
    manifest["verdict"]["metrics"][0]["lower"] = 0.0
    write_json(project / ENGINE / FILE, manifest)
    with pytest.raises(IntegrityError, match="the verdict was changed"):
        promote(project)


def test_a_forged_verdict_is_not_what_dvc_lock_names(project: Path) -> None:
    """Whoever writes a good verdict into a refused engine, seal included, still lacks the committed lock."""
    shutil.copytree(project / "engines/int8_sq", project / "engines/promoted/int8_sq")
    manifest = read_json(project / "engines/promoted/int8_sq" / FILE)
    section = read_json(project / ENGINE / FILE)["verdict"] | {"engine_digest": manifest["digest"]}
    section["seal"] = digest_json({key: value for key, value in section.items() if key != "seal"})
    write_json(project / "engines/promoted/int8_sq" / FILE, manifest | {"verdict": section})
    (project / "artifacts/verdicts/int8_sq.json").unlink()
    with pytest.raises(IntegrityError, match=r"not what dvc\.lock names"):
        promote(project, ("int8_sq",))


def test_a_refused_recipe(project: Path) -> None:
    with pytest.raises(PromotionError, match="int8_sq: no verdict has promoted"):
        promote(project, ("int8_sq",))


def test_a_newer_refusal_of_the_same_engine(project: Path) -> None:
    write_verdict(project, "int8_mixed", read_json(project / ENGINE / FILE)["digest"], "REJECT")
    with pytest.raises(PromotionError, match="newest verdict .* is REJECT"):
        promote(project)


def test_an_uncommitted_lock(project: Path) -> None:
    better = write_engine(project / "engines/int8_mixed", "int8_mixed", b"better")
    write_verdict(project, "int8_mixed", better)
    dvc(project, "repro", "-q")
    with pytest.raises(PromotionError, match=r"dvc\.lock differs from HEAD") as caught:
        promote(project)
    assert "git add dvc.yaml dvc.lock && git commit" in caught.value.next_step
    shell(project, "git", "add", "dvc.lock")
    with pytest.raises(PromotionError, match=r"dvc\.lock differs from HEAD"):
        promote(project)


def test_a_lock_that_git_does_not_hold(project: Path) -> None:
    shell(project, "git", "rm", "-q", "--cached", "dvc.lock")
    shell(project, "git", "commit", "-qm", "without")
    with pytest.raises(PromotionError, match=r"dvc\.lock is not committed"):
        promote(project)


def test_a_shallow_clone(project: Path, tmp_path: Path) -> None:
    commit_later(project)
    shell(tmp_path, "git", "clone", "-q", "--depth", "1", f"file://{project}", "shallow")
    with pytest.raises(PromotionError, match="shallow clone") as caught:
        promote(tmp_path / "shallow")
    assert "fetch-depth: 0" in caught.value.next_step


def test_no_repository(tmp_path: Path) -> None:
    with pytest.raises(PromotionError, match="no git repository"):
        promote(tmp_path)


def test_a_remote_must_hold_the_engine(project: Path, tmp_path: Path) -> None:
    assert "no default DVC remote" in promote(project, dry_run=True)[1][0]
    dvc(project, "remote", "add", "--default", "store", str(tmp_path / "store"))
    commit(project)
    with pytest.raises(PromotionError, match="not on the DVC remote") as caught:
        promote(project)
    assert "dvc push" in caught.value.next_step
    dvc(project, "push", "-q")
    done, warnings = promote(project)
    assert (done[0].action, warnings) == ("registered", [])


def test_names(project: Path) -> None:
    with pytest.raises(UsageError, match="not a version"):
        promote(project, version="1.0")
    with pytest.raises(UsageError, match="not a GTO name"):
        promote(project, name="Ünicode!")
    done, _ = promote(project, name="translator", version="v1.2.0")
    assert done[0].tag == "translator@v1.2.0"
    shell(project, "git", "remote", "add", "origin", "git@example.org:team/Shop_MT.git")
    assert promote(project, dry_run=True)[0][0].artifact == "shop_mt-int8_mixed"


def test_a_project_in_a_subfolder_of_its_repository(project: Path, tmp_path: Path) -> None:
    inner = tmp_path / "Mono/ml"
    shutil.copytree(project, inner, ignore=shutil.ignore_patterns(".git", ".dvc"))
    shell(inner.parent, "git", "init", "-q")
    dvc(inner, "init", "-q", "--subdir")
    dvc(inner, "commit", "-q", "-f")
    commit(inner.parent)
    assert promote(inner)[0][0].tag == "mono-int8_mixed@v0.0.1"
    assert promote(inner)[0][0].action == "already"


def test_a_version_that_is_taken(project: Path) -> None:
    promote(project, version="v1.0.0")
    write_verdict(project, "int8_mixed", write_engine(project / "engines/int8_mixed", "int8_mixed", b"better"))
    dvc(project, "repro", "-q")
    commit(project)
    with pytest.raises(PromotionError, match="v1.0.0"):
        promote(project, version="v1.0.0")


def test_exit_codes(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["promote", "int8_sq"]) == PromotionError.exit_code
    assert "next:" in capsys.readouterr().err
    (project / ENGINE / "model.onnx").write_bytes(b"x")
    assert main(["promote"]) == IntegrityError.exit_code
