"""The story of a promotion, and everything that must stop one, on real git, DVC and GTO."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from pipeline.cli import main
from pipeline.engines.manifest import FILE
from pipeline.errors import InputError, IntegrityError, PromotionError, RegistryError, UsageError
from pipeline.files import digest_file, digest_json, read_json, write_json
from pipeline.registry.promote import promote
from pipeline.registry.pull import pull
from tests.func.registry.conftest import (
    ARTIFACT,
    MACHINE,
    POLICY,
    commit,
    dvc,
    reproduce,
    shell,
    write_engine,
    write_verdict,
)

ENGINE = "engines/promoted/int8_mixed"
FILES = ("model.onnx", "model.onnx.data", "tokenizer/tokenizer.json", FILE)


def tags(project: Path) -> list[str]:
    return shell(project, "git", "tag").split()


def test_versions_follow_content(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["promote", "--dry-run"]) == 0
    assert tags(project) == []
    assert main(["promote"]) == 0
    assert tags(project) == [f"{ARTIFACT}@v0.0.1"]
    message = shell(project, "git", "tag", "-n99", "--format=%(contents)")
    digest = read_json(project / ENGINE / FILE)["digest"]
    assert f"engine-digest: {digest}" in message
    assert f"policy-digest: {POLICY.digest()}" in message
    assert "bleu on all loses at most 0.5" in message

    capsys.readouterr()
    (project / "other.txt").write_text("later", encoding="utf-8")
    commit(project)
    assert main(["promote", "int8_mixed", "--version", "v3.0.0"]) == 0  # the same engine on a later commit
    assert "already registered as v0.0.1" in capsys.readouterr().out

    # A better engine passes: the next version. Then a worse one is refused: the good one stays.
    better = write_engine(project / "engines/int8_mixed", "int8_mixed", b"better")
    write_verdict(project, "int8_mixed", better)
    reproduce(project)
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

    # Others get exactly these bytes by the tag, with DVC alone too.
    dvc(project, "get", ".", ENGINE, "--rev", f"{ARTIFACT}@v0.0.1", "-o", "first")
    assert (project / "first/model.onnx.data").read_bytes() == b"int8_mixed"


def test_the_registration_touches_no_branch_and_no_file(shared: Path) -> None:
    project = Path()
    before = (shell(project, "git", "status", "--porcelain"), shell(project, "git", "rev-parse", "HEAD"))
    done = promote(project, stage="staging")[0][0]
    assert (shell(project, "git", "status", "--porcelain"), shell(project, "git", "rev-parse", "HEAD")) == before
    assert shell(project, "git", "rev-parse", f"{done.commit}^").strip() == before[1].strip()
    changed = shell(project, "git", "diff", "--name-status", "HEAD", str(done.commit)).split("\n")[:-1]
    assert changed == [
        "M\tdvc.yaml",
        *(f"A\tregistry/{ARTIFACT}/{name}" for name in ("manifest.json", "provenance.json", "sbom.cdx.json")),
    ]
    entry = load_text(shell(project, "git", "show", f"{done.commit}:dvc.yaml"))["artifacts"][ARTIFACT]
    assert (entry["path"], entry["labels"]) == (ENGINE, ["engine", "onnxruntime", MACHINE])
    # git and DVC remote have everything; GTO and DVC read it as their own.
    there = shell(shared, "git", "-C", "Shop.Translator.git", "tag").split()
    assert there == [f"{ARTIFACT}#staging#1", f"{ARTIFACT}@v0.0.1"]
    gto = Path(sys.executable).with_name("gto")
    versions = json.loads(shell(project, str(gto), "show", ARTIFACT, "--json"))
    assert [(row["version"], row["stages"][0]["stage"]) for row in versions] == [("v0.0.1", "staging")]
    where = f"url={shared / 'store'}"  # the remote of these tests is relative to the clone
    dvc(shared, "artifacts", "get", "Shop.Translator.git", ARTIFACT, "--remote-config", where, "-o", "got")
    assert (shared / "got/model.onnx.data").read_bytes() == b"int8_mixed"


def load_text(text: str) -> dict[str, Any]:
    content: dict[str, Any] = YAML(typ="safe").load(text)
    return content


def test_the_completed_manifest(shared: Path) -> None:
    done = promote(Path(), stage="staging")[0][0]
    manifest = json.loads(shell(Path(), "git", "show", f"{done.commit}:registry/{ARTIFACT}/manifest.json"))
    assert manifest["digest"] == done.digest
    assert manifest["provenance"]["commit"] == shell(Path(), "git", "rev-parse", "HEAD").strip()
    assert manifest["provenance"]["dvc_lock"] == digest_file(Path("dvc.lock"))
    assert manifest["validity"] == {"machine": MACHINE, "sm": None, "packages": {}}
    row = manifest["gate"]["metrics"][0]
    assert (row["lower"], row["upper"], row["n"], row["method"]) == (-0.5, 0.3, 640, "bootstrap")
    assert row["floor"] == {"difference": 0.01, "lower": -0.08, "upper": 0.1}
    one = manifest["registration"]["objects"]["model.onnx.data"]
    assert one == {"md5": hashlib.md5(b"int8_mixed").hexdigest(), "size": 10}
    stored = shared / "store/files/md5" / one["md5"][:2] / one["md5"][2:]
    assert stored.read_bytes() == b"int8_mixed"
    # Canonical: the same content has the same bytes, whoever writes it.
    raw = subprocess.run(
        ["git", "show", f"{done.commit}:registry/{ARTIFACT}/manifest.json"], capture_output=True, check=True
    ).stdout
    assert raw == json.dumps(manifest, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


def test_a_deregistered_version_counts_no_more(project: Path) -> None:
    promote(project)
    shell(project, "git", "tag", "-a", f"{ARTIFACT}@v0.0.1!", "-m", "withdrawn")
    done, _ = promote(project)
    assert (done[0].action, done[0].version) == ("registered", "v0.0.2")


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
    manifest["gate"]["metrics"][0]["lower"] = 0.0
    write_json(project / ENGINE / FILE, manifest)
    with pytest.raises(IntegrityError, match="the verdict was changed"):
        promote(project)


def test_a_forged_verdict_is_not_what_dvc_lock_names(project: Path) -> None:
    """Whoever writes a good verdict into a refused engine, seal included, still lacks the committed lock."""
    shutil.copytree(project / "engines/int8_sq", project / "engines/promoted/int8_sq")
    manifest = read_json(project / "engines/promoted/int8_sq" / FILE)
    section = read_json(project / ENGINE / FILE)["gate"] | {"engine_digest": manifest["digest"]}
    section["seal"] = digest_json({key: value for key, value in section.items() if key != "seal"})
    write_json(project / "engines/promoted/int8_sq" / FILE, manifest | {"gate": section})
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
    reproduce(project)
    with pytest.raises(PromotionError, match=r"dvc\.lock differs from HEAD") as caught:
        promote(project)
    assert "git add dvc.yaml dvc.lock policy.yaml && git commit" in caught.value.next_step
    shell(project, "git", "add", "dvc.lock")
    with pytest.raises(PromotionError, match=r"dvc\.lock differs from HEAD"):
        promote(project)


def test_a_lock_that_git_does_not_hold(project: Path) -> None:
    shell(project, "git", "rm", "-q", "--cached", "dvc.lock")
    shell(project, "git", "commit", "-qm", "without")
    with pytest.raises(PromotionError, match=r"dvc\.lock is not committed"):
        promote(project)


def test_a_shallow_clone(project: Path, tmp_path: Path) -> None:
    (project / "later.txt").write_text("x", encoding="utf-8")
    commit(project)
    shell(tmp_path, "git", "clone", "-q", "--depth", "1", f"file://{project}", "shallow")
    with pytest.raises(PromotionError, match="shallow clone") as caught:
        promote(tmp_path / "shallow")
    assert "fetch-depth: 0" in caught.value.next_step


def test_no_repository(tmp_path: Path) -> None:
    with pytest.raises(PromotionError, match="no git repository"):
        promote(tmp_path)


def test_a_version_that_others_see_needs_bytes_that_others_get(project: Path, tmp_path: Path) -> None:
    assert "only this clone has the version and the bytes" in promote(project, dry_run=True)[1][0]
    shell(tmp_path, "git", "init", "-q", "--bare", "origin.git")
    shell(project, "git", "remote", "add", "origin", str(tmp_path / "origin.git"))
    with pytest.raises(PromotionError, match="no DVC remote holds the bytes"):
        promote(project)
    with pytest.raises(RegistryError, match="remote 'nowhere' doesn't exist"):
        promote(project, remote="nowhere")
    assert tags(project) == []


def test_another_policy_than_the_one_judged_under(project: Path) -> None:
    (project / "policy.yaml").write_text("confidence: 0.9\n", encoding="utf-8")
    commit(project)
    with pytest.raises(PromotionError, match="int8_mixed: was judged under policy"):
        promote(project)
    # What is done with a verdict is not part of the policy's digest.
    (project / "policy.yaml").write_text("require: all\n", encoding="utf-8")
    commit(project)
    assert promote(project)[0][0].action == "registered"


def test_a_lost_object_is_pushed_again(shared: Path) -> None:
    promote(Path())
    md5 = hashlib.md5(b"int8_mixed").hexdigest()
    lost = shared / "store/files/md5" / md5[:2] / md5[2:]
    lost.unlink()
    assert promote(Path())[0][0].action == "already"
    assert lost.read_bytes() == b"int8_mixed"


def test_a_store_that_gives_back_other_bytes(shared: Path) -> None:
    """An object of the right name and size is believed only when it is read."""
    md5 = hashlib.md5(b"int8_mixed").hexdigest()
    there = shared / "store/files/md5" / md5[:2] / md5[2:]
    there.parent.mkdir(parents=True)
    there.write_bytes(b"int8-mixed")
    with pytest.raises(IntegrityError, match=r"model\.onnx\.data comes back with other bytes"):
        promote(Path())
    assert tags(Path()) == []
    there.unlink()
    assert promote(Path())[0][0].action == "registered"


def test_names(project: Path) -> None:
    with pytest.raises(UsageError, match="not a version"):
        promote(project, version="1.0")
    with pytest.raises(UsageError, match="not a name"):
        promote(project, name="Ünicode!")
    with pytest.raises(UsageError, match="not the name of a stage"):
        promote(project, stage="a b")
    done, _ = promote(project, name="translator", version="v1.2.0")
    assert done[0].tag == f"translator-onnxruntime-{MACHINE}@v1.2.0"


def test_the_name_is_that_of_the_remote(shared: Path) -> None:
    (shared / "Shop.Translator.git").rename(shared / "Shop_MT.git")
    shell(Path(), "git", "remote", "set-url", "origin", "../Shop_MT.git")
    assert promote(Path(), dry_run=True)[0][0].artifact == f"shop_mt-int8_mixed-onnxruntime-{MACHINE}"


def test_a_project_in_a_subfolder_of_its_repository(project: Path, tmp_path: Path) -> None:
    inner = tmp_path / "Mono/ml"
    shutil.copytree(project, inner, ignore=shutil.ignore_patterns(".git", ".dvc"))
    shell(inner.parent, "git", "init", "-q")
    dvc(inner, "init", "-q", "--subdir")
    dvc(inner, "commit", "-q", "-f")
    commit(inner.parent)
    assert promote(inner)[0][0].tag == f"ml=mono-int8_mixed-onnxruntime-{MACHINE}@v0.0.1"
    assert promote(inner)[0][0].action == "already"
    assert pull(inner, "mono-int8_mixed").version == "v0.0.1"


def test_a_version_that_is_taken(project: Path) -> None:
    promote(project, version="v1.0.0")
    write_verdict(project, "int8_mixed", write_engine(project / "engines/int8_mixed", "int8_mixed", b"better"))
    reproduce(project)
    commit(project)
    with pytest.raises(PromotionError, match="v1.0.0"):
        promote(project, version="v1.0.0")


def test_exit_codes(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["promote", "int8_sq"]) == PromotionError.exit_code
    assert "next:" in capsys.readouterr().err
    (project / ENGINE / "model.onnx").write_bytes(b"x")
    assert main(["promote"]) == IntegrityError.exit_code
