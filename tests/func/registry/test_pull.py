"""What a serving team gets: the right build, whole, or an error and nothing."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli import main
from pipeline.engines.manifest import FILE, write_manifest
from pipeline.errors import IntegrityError, PromotionError, RegistryError, UnfitError, UsageError
from pipeline.files import digest_tree, read_json
from pipeline.registry import pull as pulling
from pipeline.registry.fit import Machine
from pipeline.registry.promote import promote
from pipeline.registry.pull import fetch_file, pull
from pipeline.registry.rollback import rollback
from pipeline.registry.store import Object, Store, cache_store, remote_store
from pipeline.registry.verify import verify_folder
from tests.func.registry.conftest import (
    ARTIFACT,
    FAMILY,
    MACHINE,
    clone,
    commit,
    reproduce,
    shell,
    write_engine,
    write_verdict,
)

ENGINE_FILES = ("model.onnx", "model.onnx.data", "tokenizer/tokenizer.json")
HERE = Machine(MACHINE, None, "no GPU in this test")


@pytest.fixture
def serving(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone on another machine, after v0.0.1 went to production; the test runs in it."""
    promote(Path(), stage="production")
    folder = clone(shared, "serving")
    monkeypatch.chdir(folder)
    return folder


def stored(shared: Path, content: bytes) -> Path:
    md5 = hashlib.md5(content).hexdigest()
    return shared / "store/files/md5" / md5[:2] / md5[2:]


def test_by_name_version_and_stage(serving: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for reference in (FAMILY, ARTIFACT, f"{FAMILY}@v0.0.1", f"{ARTIFACT}#production"):
        assert main(["pull", reference, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["fetched"] == (reference == FAMILY)
        assert found["folder"] == str(serving / f"engines/pulled/{ARTIFACT}@v0.0.1")
        assert (found["artifact"], found["version"], found["signature"]) == (ARTIFACT, "v0.0.1", "none")
    folder = Path(found["folder"])
    assert (folder / "model.onnx.data").read_bytes() == b"int8_mixed"
    assert sorted(path.name for path in folder.iterdir()) == [
        *(FILE, "model.onnx", "model.onnx.data", "provenance.json", "sbom.cdx.json", "tokenizer")
    ]
    assert main(["pull", FAMILY]) == 0
    assert "is here already, every byte verified; not signed" in capsys.readouterr().out
    assert main(["pull", FAMILY, "--output", "somewhere/else"]) == 0
    assert digest_tree(Path("somewhere/else")) == digest_tree(folder)


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        ("nothing", "nothing: not registered"),
        (f"{FAMILY}@v9.9.9", "no such version v9.9.9"),
        (f"{FAMILY}#dev", "no such stage dev"),
        ("a@b", "not a reference"),
        ("../x", "not a reference"),
    ],
)
def test_references_that_name_nothing(serving: Path, reference: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        pull(serving, reference)
    assert not Path("engines/pulled").exists()


@pytest.mark.parametrize("content", [b"graph", b"int8_mixed", b"{}"], ids=ENGINE_FILES)
@pytest.mark.parametrize("how", ["changed", "cut", "longer", "lost"])
def test_bytes_in_the_store_that_are_not_those_promoted(
    shared: Path, serving: Path, content: bytes, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = stored(shared, content)
    file.chmod(0o644)
    if how == "lost":
        file.unlink()
    else:
        wrong = {"changed": content[:-1] + b"#", "cut": content[:-1], "longer": content + b"#"}
        file.write_bytes(wrong[how])
    with pytest.raises(IntegrityError, match=r"has other bytes than were promoted|has no object"):
        pull(serving, FAMILY)
    assert not (serving / f"engines/pulled/{ARTIFACT}@v0.0.1").exists()
    assert main(["verify", FAMILY]) == IntegrityError.exit_code  # reads the store
    assert "as the manifest says" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ENGINE_FILES)
def test_one_byte_in_a_pulled_folder(serving: Path, name: str) -> None:
    """Without a signature; `test_trust` has every file of the folder, with one."""
    folder = pull(serving, FAMILY).folder
    file = folder / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert main(["verify", str(folder)]) == IntegrityError.exit_code
    assert pull(serving, FAMILY).fetched  # made whole again
    assert main(["verify", str(folder)]) == 0


def test_a_file_too_many_and_one_too_few(serving: Path) -> None:
    folder = pull(serving, FAMILY).folder
    (folder / "extra.so").write_bytes(b"x")
    with pytest.raises(IntegrityError, match=r"extra\.so: not in the manifest"):
        verify_folder(folder)
    (folder / "extra.so").unlink()
    (folder / "sbom.cdx.json").unlink()
    with pytest.raises(IntegrityError, match=r"sbom\.cdx\.json is missing"):
        verify_folder(folder)


@dataclass(frozen=True)
class Broken(Store):
    """A store whose connection breaks after some bytes; ``came`` counts what was read over it."""

    after: int = 0
    came: list[int] = field(default_factory=list)

    def copy(self, md5: str, file: FileIO, moved: Callable[[int], object]) -> None:
        rest = Path(self.place(md5)).read_bytes()[file.tell() :]
        part = rest[: self.after]
        file.write(part)
        moved(len(part))
        self.came.append(len(part))
        if len(part) < len(rest):
            raise RegistryError("the connection broke", "")


def broken(store: Store, after: int) -> Broken:
    return Broken(store.fs, store.path, store.label, after)


def test_it_goes_on_in_the_middle_of_a_file(shared: Path, serving: Path) -> None:
    content = os.urandom(100_000)
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    file = stored(shared, content)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    store = remote_store(serving)
    assert store is not None
    one, target = Object(hashlib.md5(content).hexdigest(), len(content)), serving / "part/weights"
    for after in (0, 30_000, 1, 50_000):
        with pytest.raises(RegistryError, match="broke"):
            fetch_file(broken(store, after), one, target, digest)
    assert target.stat().st_size == 80_001
    rest = broken(store, 1 << 20)
    fetch_file(rest, one, target, digest)
    assert rest.came == [19_999]
    assert target.read_bytes() == content

    # The store itself, which copies within the kernel, goes on as well.
    target.write_bytes(content[:70_000])
    fetch_file(store, one, target, digest)
    assert target.read_bytes() == content

    # What was left behind is damaged: it is found out and fetched from the start.
    target.write_bytes(b"\0" * 60_000)
    again = broken(store, 1 << 20)
    fetch_file(again, one, target, digest)
    assert again.came == [40_000, 100_000]
    assert target.read_bytes() == content


def test_an_interrupted_pull_leaves_no_engine_and_is_gone_on_from(
    serving: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = pulling.fetch_file

    def interrupted(store: Store, one: Object, file: Path, *rest: Any) -> None:
        if file.name == "model.onnx.data":
            raise RegistryError("the connection broke", "")
        fetch(store, one, file, *rest)

    monkeypatch.setattr(pulling, "fetch_file", interrupted)
    with pytest.raises(RegistryError, match="broke"):
        pull(serving, FAMILY)
    left = serving / f"engines/pulled/.{ARTIFACT}@v0.0.1.part"
    assert not (serving / f"engines/pulled/{ARTIFACT}@v0.0.1").exists()
    assert (left / "model.onnx").read_bytes() == b"graph"
    (left / "leftover").write_bytes(b"of another version")
    monkeypatch.setattr(pulling, "fetch_file", fetch)
    assert verify_folder(pull(serving, FAMILY).folder).files == 3
    assert not left.exists()


def test_the_cache_is_nearer_than_the_remote(shared: Path) -> None:
    """The machine that promoted needs no remote; a damaged cache is found out."""
    promote(Path())
    (shared / "store").rename(shared / "away")
    assert pull(Path(), FAMILY).fetched
    cached = Path(cache_store(Path()).place(hashlib.md5(b"graph").hexdigest()))
    cached.chmod(0o644)
    cached.write_bytes(b"Graph")
    shutil.rmtree("engines/pulled")
    with pytest.raises(IntegrityError, match=r"DVC cache .*model\.onnx"):
        pull(Path(), FAMILY)


@pytest.mark.usefixtures("serving")
def test_a_shallow_clone_is_refused(shared: Path) -> None:
    shell(shared, "git", "clone", "-q", "--depth", "1", f"file://{shared}/Shop.Translator.git", "shallow")
    with pytest.raises(PromotionError, match="shallow clone"):
        pull(shared / "shallow", FAMILY)
    os.chdir(shared / "shallow")
    assert main(["list"]) == PromotionError.exit_code


def test_news_and_offline(shared: Path, serving: Path) -> None:
    """A stage that moved elsewhere is seen at the next pull, unless one asks to stay with what is known."""
    project = shared / "Shop.Translator"
    write_verdict(project, "int8_mixed", write_engine(project / "engines/int8_mixed", "int8_mixed", b"better"))
    reproduce(project)
    commit(project)
    promote(project, stage="production")
    assert pull(serving, f"{FAMILY}#production", offline=True).version == "v0.0.1"
    assert pull(serving, f"{FAMILY}#production").version == "v0.0.2"
    (shared / "Shop.Translator.git").rename(shared / "gone.git")
    with pytest.raises(RegistryError, match="git fetch") as caught:
        pull(serving, FAMILY)
    assert "--offline" in caught.value.next_step
    assert pull(serving, FAMILY, offline=True).version == "v0.0.2"


def promote_for(project: Path, sm: str, tensorrt: str) -> str:
    """Builds and promotes for a GPU as if on a machine that has it; returns the digest."""
    engine = project / "engines/int8_mixed"
    write_engine(engine, "int8_mixed", f"plan {sm} {tensorrt}".encode())
    manifest = read_json(engine / FILE)
    (engine / FILE).unlink()
    description = {key: manifest[key] for key in ("name", "recipe", "dtype", "limits", "sources")}
    platform, build = {"cpu": MACHINE, "gpu": "H", "sm": sm}, {"versions": {"tensorrt": tensorrt}}
    made = write_manifest(engine, description | {"backend": "tensorrt", "platform": platform, "build": build})
    write_verdict(project, "int8_mixed", made["digest"])
    reproduce(project)
    commit(project)
    return str(promote(project, stage="production")[0][0].digest)


def test_the_build_that_fits(shared: Path, serving: Path) -> None:
    project = shared / "Shop.Translator"
    digests = {sm: promote_for(project, sm, "10.13.3") for sm in ("89", "90")}
    assert f"{FAMILY}-tensorrt-sm89@v0.0.1" in shell(project, "git", "tag")
    for sm, digest in digests.items():
        gpu = Machine(MACHINE, sm, packages={"tensorrt": "10.13.3"})
        found = pull(serving, f"{FAMILY}#production", machine=gpu)
        assert (found.artifact, found.digest) == (f"{FAMILY}-tensorrt-sm{sm}", digest)
    # Without a GPU, or with another TensorRT, the engine for the CPU is the one that runs.
    assert pull(serving, FAMILY, machine=HERE).artifact == ARTIFACT
    old = Machine(MACHINE, "90", packages={"tensorrt": "10.9.0"})
    assert pull(serving, FAMILY, machine=old).artifact == ARTIFACT
    with pytest.raises(UnfitError, match=r"built for SM 90, this GPU is SM 89; needs tensorrt 10\.13\.3, here is 9\.2"):
        pull(serving, f"{FAMILY}-tensorrt-sm90", machine=Machine(MACHINE, "89", packages={"tensorrt": "9.2"}))
    with pytest.raises(UnfitError, match="no GPU in this test"):
        pull(serving, f"{FAMILY}-tensorrt-sm90", machine=HERE)
    arguments = ["pull", f"{FAMILY}-tensorrt-sm90", "--sm", "90", "--package"]
    assert main([*arguments, "tensorrt=10.13.3", "--output", "for-another-machine"]) == 0
    assert main([*arguments, "tensorrt=10.9"]) == UnfitError.exit_code
    assert main([*arguments, "tensorrt"]) == UsageError.exit_code
    with pytest.raises(UsageError, match="several builds"):
        rollback(serving, f"{FAMILY}#production")


def test_a_tag_that_points_at_another_registration(shared: Path, serving: Path) -> None:
    """Whoever re-tags an engine under a number, or another artifact's name, is found out without any signature."""
    digest = read_json(shared / "Shop.Translator/engines/promoted/int8_mixed" / FILE)["digest"]
    for name in (f"{ARTIFACT}@v0.0.2", f"{FAMILY}-onnxruntime-arm64@v0.0.1"):
        shell(serving, "git", "tag", "-a", name, f"{ARTIFACT}@v0.0.1^{{}}", "-m", f"x\n\nengine-digest: {digest}")
    with pytest.raises(IntegrityError, match=rf"{ARTIFACT}@v0.0.2: the tag names"):
        pull(serving, ARTIFACT)
    with pytest.raises(IntegrityError, match="arm64@v0.0.1: its commit .* holds no registration"):
        pull(serving, f"{FAMILY}@v0.0.1")
    assert main(["list"]) == IntegrityError.exit_code
    assert pull(serving, f"{ARTIFACT}@v0.0.1").fetched
