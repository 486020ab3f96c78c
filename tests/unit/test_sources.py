"""What a run starts from is noticed when it changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.errors import InputError
from pipeline.params import Data, Model, Params
from pipeline.sources import resolve_sources


def _params(model: Model | None = None, data: Data | None = None) -> Params:
    return Params(model=model or Model(), data=data or Data())


def test_the_demo_needs_no_network() -> None:
    sources = resolve_sources(Params())
    assert sources["model"]["kind"] == "demo"
    assert "adapter_model.safetensors" in sources["model"]["adapter"]


def test_a_changed_file_changes_the_sources(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    params = _params(Model(checkpoint=str(tmp_path)))
    before = resolve_sources(params)
    assert resolve_sources(params) == before
    (tmp_path / "config.json").write_text("{ }")
    assert resolve_sources(params) != before


def test_a_pinned_hub_commit_needs_no_network() -> None:
    params = _params(Model(checkpoint="org/name", revision="0" * 40), Data(source="org/data", revision="1" * 40))
    sources = resolve_sources(params)
    assert sources["model"] == {"kind": "hub", "id": "org/name", "commit": "0" * 40}
    assert sources["data"] == {"kind": "hub", "id": "org/data", "commit": "1" * 40}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (_params(Model(checkpoint="./nowhere")), "./nowhere is not a folder"),
        (_params(Model(checkpoint="nowhere")), "nowhere is not a folder"),
        (_params(Model(adapter="no-adapter", checkpoint="tests")), "no-adapter: no such folder"),
        (_params(data=Data(source="rows.jsonl")), "rows.jsonl is not a"),
        (_params(data=Data(source="json", calib_file="a.jsonl")), "only one of calib_file and eval_file"),
        (_params(data=Data(source="json", calib_file="a.jsonl", eval_file="b.jsonl")), "a.jsonl: no such file"),
    ],
)
def test_missing_sources_are_named(params: Params, message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve_sources(params)
