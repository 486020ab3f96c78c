"""A plan is code: the library is given one only when its bytes, its GPU and its TensorRT are the right ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.engines import load_executor
from pipeline.engines.manifest import write_manifest
from pipeline.engines.tensorrt import device
from pipeline.engines.tensorrt.plan import Binding, Description, open_plan, read_description
from pipeline.errors import BuildError, EnginegateError, IntegrityError
from pipeline.files import read_json, write_json
from tests.unit.engines.tensorrt.fake import FakeDevice

DESCRIPTION = Description(
    library="tensorrt",
    version="10.9.0",
    sm=["90"],
    profiles=[],
    bindings=[Binding("input_ids", True, "int32", ["batch", "new"])],
    cache={},
    limits={"max_batch": 1, "max_tokens": 16},
)
MANIFEST: dict[str, Any] = {
    "name": "x",
    "recipe": None,
    "backend": "tensorrt",
    "dtype": "float16",
    "limits": {"max_batch": 1, "max_tokens": 16, "threads": 0},
    "sources": {},
    "platform": {"sm": "90"},
    "build": {},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.plan").write_bytes(b"no plan of any library" * 100)
    DESCRIPTION.write(tmp_path)
    write_manifest(tmp_path, MANIFEST)
    return tmp_path


def test_the_description_comes_back(folder: Path) -> None:
    assert read_description(folder) == DESCRIPTION


def test_the_right_plan_reaches_the_library_and_its_refusal_is_told(folder: Path, install: Callable[..., Any]) -> None:
    trt = install("10.9.0")
    with pytest.raises(BuildError, match="tensorrt 10.9.0 does not load the plan: the plan is corrupt"):
        open_plan(folder, "90")
    assert trt.calls == 1


def cut(folder: Path) -> None:
    content = (folder / "model.plan").read_bytes()
    (folder / "model.plan").write_bytes(content[: len(content) // 2])


def flip(folder: Path) -> None:
    content = bytearray((folder / "model.plan").read_bytes())
    content[77] ^= 1
    (folder / "model.plan").write_bytes(bytes(content))


def describe_otherwise(folder: Path) -> None:
    content = read_json(folder / "engine.json")
    write_json(folder / "engine.json", content | {"sm": ["89", "90"]})


def claim_otherwise(folder: Path) -> None:
    content = read_json(folder / "manifest.json")
    content["files"]["model.plan"] = "sha256:" + "0" * 64
    write_json(folder / "manifest.json", content)


def forget(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    content = (folder / "model.plan").read_bytes()
    (folder / "model.plan").unlink()
    write_manifest(folder, MANIFEST)
    (folder / "model.plan").write_bytes(content)


def other_form(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    write_json(folder / "engine.json", {"plan": "of another time"})
    write_manifest(folder, MANIFEST)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (cut, r"model.plan: 1100 bytes of sha256:.*, the manifest says sha256:"),
        (flip, r"model.plan: 2200 bytes of sha256:"),
        (lambda folder: (folder / "model.plan").unlink(), "model.plan: missing"),
        (describe_otherwise, "engine.json: .*the manifest says"),
        (claim_otherwise, "manifest.json: the digest does not fit"),
        (forget, "its manifest names no model.plan"),
        (other_form, "engine.json: 'bindings'"),
    ],
)
def test_foreign_bytes_never_reach_the_library(
    folder: Path, install: Callable[..., Any], damage: Callable[[Path], None], named: str
) -> None:
    trt = install("10.9.0")
    damage(folder)
    with pytest.raises(IntegrityError, match=named) as caught:
        open_plan(folder, "90")
    assert caught.value.next_step
    assert trt.calls == 0


@pytest.mark.parametrize(
    ("version", "sm", "named"),
    [
        ("10.9.0", "89", "compiled for SM 90, this GPU is SM 89"),
        ("10.9.1", "90", "compiled by tensorrt 10.9.0, here is 10.9.1"),
        ("8.6.0", "90", "compiled by tensorrt 10.9.0, here is 8.6.0"),
    ],
)
def test_another_gpu_or_another_version(
    folder: Path, install: Callable[..., Any], version: str, sm: str, named: str
) -> None:
    trt = install(version)
    with pytest.raises(BuildError, match=named):
        open_plan(folder, sm)
    assert trt.calls == 0


def test_the_executor_goes_through_the_same_door(
    folder: Path, install: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    trt = install("10.9.0")
    monkeypatch.setattr(device, "Device", FakeDevice)  # its SM is 90
    flip(folder)
    with pytest.raises(EnginegateError, match="the manifest says"):
        load_executor(folder)
    assert trt.calls == 0
