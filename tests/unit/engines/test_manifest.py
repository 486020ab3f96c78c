"""A manifest names every byte of an engine."""

from __future__ import annotations

import json
import posixpath
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.engines.manifest import SCHEMA_FILE, read_manifest, save_manifest, verify_files, write_manifest
from pipeline.errors import IntegrityError
from pipeline.files import read_json, write_json

DESCRIPTION: dict[str, Any] = {
    "name": "x",
    "recipe": "x",
    "backend": "onnxruntime",
    "dtype": "int8",
    "limits": {"max_batch": 1},
    "sources": {},
    "platform": {"sm": None},
    "build": {"seconds": 1},
}


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "model.onnx").write_bytes(b"graph")
    (tmp_path / "tokenizer" / "tokenizer.json").write_bytes(b"{}")
    write_manifest(tmp_path, DESCRIPTION)
    return tmp_path


def test_a_whole_engine_verifies(engine: Path) -> None:
    manifest = verify_files(engine)
    assert sorted(manifest["files"]) == ["model.onnx", "tokenizer/tokenizer.json"]
    assert manifest["digest"].startswith("sha256:")


def test_the_digest_is_of_the_identity_only(engine: Path) -> None:
    first = read_manifest(engine)["digest"]
    assert write_manifest(engine, DESCRIPTION | {"build": {"seconds": 2}})["digest"] == first
    assert write_manifest(engine, DESCRIPTION | {"platform": {"sm": "89"}})["digest"] != first


@pytest.mark.parametrize("name", ["model.onnx", "tokenizer/tokenizer.json"])
def test_a_changed_byte_in_any_file_is_found(engine: Path, name: str) -> None:
    content = bytearray((engine / name).read_bytes())
    content[0] ^= 1
    (engine / name).write_bytes(bytes(content))
    with pytest.raises(IntegrityError, match=f"{name}: its bytes are not those"):
        verify_files(engine)


def test_missing_added_and_edited(engine: Path) -> None:
    (engine / "extra").write_bytes(b"")
    with pytest.raises(IntegrityError, match="extra: not in the manifest"):
        verify_files(engine)
    (engine / "extra").unlink()
    (engine / "model.onnx").unlink()
    with pytest.raises(IntegrityError, match="model.onnx: missing"):
        verify_files(engine)
    manifest = read_json(engine / "manifest.json")
    write_json(engine / "manifest.json", manifest | {"recipe": "other"})
    with pytest.raises(IntegrityError, match="the digest does not fit"):
        read_manifest(engine)


def test_a_manifest_of_a_newer_version_is_refused(engine: Path) -> None:
    manifest = read_json(engine / "manifest.json")
    write_json(engine / "manifest.json", manifest | {"schema": 2, "something": "new"})
    with pytest.raises(IntegrityError, match="schema 2 is newer than this enginegate, which reads 1") as caught:
        read_manifest(engine)
    assert caught.value.next_step == "upgrade enginegate"
    for old in (0, None, "1"):
        write_json(engine / "manifest.json", manifest | {"schema": old})
        with pytest.raises(IntegrityError, match="schema"):
            read_manifest(engine)
    write_json(engine / "manifest.json", [])
    with pytest.raises(IntegrityError, match="schema None"):
        read_manifest(engine)


def test_the_schema_is_a_schema() -> None:
    from jsonschema import Draft202012Validator

    Draft202012Validator.check_schema(json.loads(SCHEMA_FILE.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"surprise": 1}, "'surprise' was unexpected"),
        ({"backend": ""}, r"backend: ''"),
        ({"files": {"a": "md5:x"}}, r"files\.a: 'md5:x'"),
        ({"validity": {"machine": None, "sm": [], "packages": {}}}, r"validity\.sm"),
        ({"validity": {"machine": None, "sm": "90", "packages": {}}}, r"validity\.sm: '90'"),
        ({"gate": {"verdict": "REJECT"}}, "gate"),
    ],
)
def test_what_breaks_the_schema_is_named(engine: Path, change: dict[str, Any], says: str) -> None:
    manifest = read_json(engine / "manifest.json") | change
    with pytest.raises(IntegrityError, match=says):
        save_manifest(engine, manifest)
    write_json(engine / "manifest.json", manifest)
    with pytest.raises(IntegrityError, match=says):
        read_manifest(engine)


# A manifest names where files are written when it is pulled: never outside of the folder.
@pytest.mark.parametrize(
    "name", ["../x", "/etc/x", "a/../../x", "..", ".", "a/./b", "a//b", "a\\b", "a\nb", "", "a/.."]
)
def test_no_file_leaves_the_folder(engine: Path, name: str) -> None:
    manifest = read_json(engine / "manifest.json")
    with pytest.raises(IntegrityError, match="files"):
        save_manifest(engine, manifest | {"files": {name: "sha256:" + 64 * "0"}})


@given(st.text(max_size=12))
def test_every_name_that_passes_stays_inside(name: str) -> None:
    from jsonschema import Draft202012Validator

    schema = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    if Draft202012Validator(schema["$defs"]["path"]).is_valid(name):
        assert posixpath.normpath(posixpath.join("/folder", name)) == f"/folder/{name}"


def test_where_it_may_be_loaded(engine: Path) -> None:
    platform = {"cpu": "x86_64 avx2", "sm": "90", "tensorrt": "10.13.3"}
    description = DESCRIPTION | {"platform": platform}
    assert write_manifest(engine, description)["validity"] == {"machine": "x86_64", "sm": None, "packages": {}}
    built = {"versions": {"tensorrt": "10.13.3", "onnx": "1.20"}}
    plan = write_manifest(engine, description | {"backend": "tensorrt", "build": built})["validity"]
    assert plan == {"machine": "x86_64", "sm": ["90"], "packages": {"tensorrt": "10.13.3"}}
    ahead = {"platform": {"cpu": "x86_64", "sm": "89 120"}, "build": {"versions": {"tensorrt_rtx": "1.7.1"}}}
    plan = write_manifest(engine, description | {"backend": "tensorrt"} | ahead)["validity"]
    assert plan == {"machine": "x86_64", "sm": ["89", "120"], "packages": {"tensorrt_rtx": "1.7.1"}}
    # TensorRT-LLM: what its own environment was, not what is here; its checkpoints are bound to no GPU.
    versions = {"tensorrt": "10.9", "tensorrt_llm": "1.2.1", "torch": "2.9"}
    build = {"versions": versions, "profile": "engine", "runtime": {"sm": "89"}}
    llm = write_manifest(engine, description | {"backend": "tensorrt_llm", "build": build})["validity"]
    assert (llm["sm"], llm["packages"]) == (["89"], {"tensorrt": "10.9", "tensorrt_llm": "1.2.1"})
    build["profile"] = "pytorch"
    llm = write_manifest(engine, description | {"backend": "tensorrt_llm", "build": build})["validity"]
    assert (llm["sm"], llm["packages"]) == (None, {"tensorrt_llm": "1.2.1"})
    vllm = write_manifest(engine, description | {"backend": "vllm", "build": {"versions": {"vllm": "0.25"}}})[
        "validity"
    ]
    assert vllm == {"machine": "x86_64", "sm": None, "packages": {}}
    own = {"machine": "x86_64", "sm": ["89", "120"], "packages": {}}
    assert write_manifest(engine, description | {"backend": "tensorrt", "validity": own})["validity"] == own
