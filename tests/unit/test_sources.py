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


def test_an_adapter_counts_whatever_its_base_is(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    params = _params(Model(checkpoint="org/name", revision="0" * 40, adapter=str(tmp_path)))
    before = resolve_sources(params)["model"]
    assert "adapter_config.json" in before["adapter"]
    (tmp_path / "adapter_config.json").write_text("{ }")
    assert resolve_sources(params)["model"] != before


def test_a_prompt_log_its_profile_and_its_hooks_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.jsonl", "b.jsonl", "eval.jsonl"):
        (tmp_path / name).write_text("{}\n")
    hook = tmp_path / "hook_for_sources.py"
    hook.write_text("def scrub(text): return text\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    log = f"{tmp_path}/[ab].jsonl"
    data = Data(
        source="json",
        eval_file=str(tmp_path / "eval.jsonl"),
        calib_log=log,
        profile_log=str(tmp_path / "a.jsonl"),
        redact=("email", "hook_for_sources:scrub"),
    )
    found = resolve_sources(_params(data=data))["data"]
    assert found["kind"] == "files"
    assert list(found["files"]) == [str(tmp_path / "eval.jsonl")]
    assert found["log"]["pattern"] == log
    assert list(found["log"]["files"]) == [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    assert list(found["profile_log"]["files"]) == [str(tmp_path / "a.jsonl")]
    assert found["redact"]["email"] == "built-in"
    for path in (tmp_path / "b.jsonl", hook):
        path.write_text(path.read_text() + "\n")
        changed = resolve_sources(_params(data=data))["data"]
        assert changed != found
        found = changed
    assert resolve_sources(_params(data=Data(calib_log=log)))["data"]["kind"] == "demo"


def test_one_set_may_come_from_a_file_and_the_other_from_the_source(tmp_path: Path) -> None:
    (tmp_path / "eval.jsonl").write_text("{}")
    mine = str(tmp_path / "eval.jsonl")
    found = resolve_sources(_params(data=Data(source="org/data", revision="1" * 40, eval_file=mine)))["data"]
    assert (found["kind"], found["id"], list(found["files"])) == ("hub", "org/data", [mine])
    assert resolve_sources(_params(data=Data(eval_file=mine)))["data"]["kind"] == "demo"


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (_params(Model(checkpoint="./nowhere")), "./nowhere is not a folder"),
        (_params(Model(checkpoint="nowhere")), "nowhere is not a folder"),
        (_params(Model(adapter="no-adapter", checkpoint="tests")), "no-adapter: no such folder"),
        (_params(data=Data(source="rows.jsonl")), "rows.jsonl is not a"),
        (_params(data=Data(source="json", calib_file="README.md")), "only one of calib_file and eval_file"),
        (_params(data=Data(source="json", calib_file="a.jsonl", eval_file="b.jsonl")), "a.jsonl: no such file"),
        (_params(data=Data(calib_log="no/*.jsonl")), "no/\\*.jsonl: no such prompt log"),
        (_params(data=Data(calib_log="README.md", calib_file="a.jsonl")), "calib_file and calib_log are both given"),
        (_params(data=Data(redact=("no_such_hook:scrub",))), "no module no_such_hook"),
    ],
)
def test_missing_sources_are_named(params: Params, message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve_sources(params)
