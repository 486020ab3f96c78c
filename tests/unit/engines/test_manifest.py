"""A manifest names every byte of an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.engines.manifest import read_manifest, verify_files, write_manifest
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
    write_json(engine / "manifest.json", manifest | {"schema": 99})
    with pytest.raises(IntegrityError, match="schema 99"):
        read_manifest(engine)
