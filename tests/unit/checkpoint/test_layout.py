"""What lies in a checkpoint folder is looked at before anything is read: each fault with its way out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.checkpoint.layout import INDEX, read_layout, read_settings
from pipeline.errors import CheckpointError
from tests.unit.checkpoint.conftest import edit_json, split


def _only(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / name)


def _index(folder: Path, **weight_map: str) -> None:
    split(folder)
    content = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps({"weight_map": content["weight_map"] | weight_map}))


def _twin_key(folder: Path) -> None:
    split(folder)
    text = (folder / INDEX).read_text()
    (folder / INDEX).write_text(text.replace('"model.norm.weight"', '"model.layers.0.input_layernorm.weight"'))


def _lost_shard(folder: Path) -> None:
    (folder / split(folder)[1]).unlink()


def _shard_without_index(folder: Path) -> None:
    split(folder)
    (folder / INDEX).unlink()


def _extra_shard(folder: Path) -> None:
    names = split(folder)
    (folder / "model-00004-of-00004.safetensors").write_bytes((folder / names[0]).read_bytes())


def _foreign_link(folder: Path) -> None:
    outside = folder.parent / "secret.json"
    outside.write_text("{}")
    (folder / "special_tokens_map.json").symlink_to(outside)


def _adapter_beside(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")


@pytest.mark.parametrize(
    ("spoil", "message", "way_out"),
    [
        (lambda folder: _only(folder, "pytorch_model.bin"), "only pytorch_model.bin", "save_pretrained"),
        (lambda folder: _only(folder, "model.pkl"), "only model.pkl", "pickle files can run code"),
        (lambda folder: _only(folder, "consolidated.00.pth"), "only consolidated.00.pth", "convert"),
        (lambda folder: _only(folder, "model.Q4_1.gguf"), "only model.Q4_1.gguf", "gguf_file=NAME"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no weights at all", "save_pretrained"),
        (lambda folder: (folder / "config.json").unlink(), "no config.json", "save_pretrained"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json: not usable JSON", "copy"),
        (lambda folder: (folder / "config.json").write_text("[]"), "config.json: not a JSON object", "copy"),
        (_lost_shard, "the index names model-00002-of-00003.safetensors, which is missing", "copy all shards"),
        (_shard_without_index, "no model.safetensors.index.json, but files that only an index", "copy the index"),
        (_extra_shard, "model-00004-of-00004.safetensors is not in model.safetensors.index.json", "move the file"),
        (_twin_key, "the key 'model.layers.0.input_layernorm.weight' stands twice", "copy"),
        (lambda folder: _index(folder, x="../../other.safetensors"), "the index sends x to", "never load"),
        (lambda folder: _index(folder, x="/etc/other.safetensors"), "the index sends x to", "never load"),
        (lambda folder: _index(folder, x="sub/other.safetensors"), "the index sends x to", "never load"),
        (lambda folder: _index(folder, x="pytorch_model.bin"), "the index sends x to 'pytorch_model.bin'", "never"),
        (lambda folder: edit_json(folder / INDEX, weight_map={}), "has no weight_map", "copy the index"),
        (_foreign_link, "special_tokens_map.json links to .*secret.json, outside the checkpoint", "cp "),
        (lambda folder: (folder / "merges.txt").symlink_to("nowhere"), "nowhere, which is missing", "copy the file"),
        (_adapter_beside, "this is a LoRA adapter", "model.adapter"),
    ],
)
def test_bad_folders_are_refused(checkpoint: Path, spoil: Callable[[Path], Any], message: str, way_out: str) -> None:
    spoil(checkpoint)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_layout(checkpoint)
    assert way_out in caught.value.next_step


@pytest.mark.parametrize("method", ["awq", "gptq", "fp8", "bitsandbytes", "compressed-tensors", "mxfp4", "modelopt"])
def test_a_quantised_config_is_refused_with_the_way_out(checkpoint: Path, method: str) -> None:
    edit_json(checkpoint / "config.json", quantization_config={"quant_method": method})
    with pytest.raises(CheckpointError, match=f"already quantised .*{method}") as caught:
        read_layout(checkpoint)
    assert "before quantisation" in caught.value.next_step
    assert ("dequantize" in caught.value.next_step) == (method in {"fp8", "bitsandbytes", "mxfp4"})


@pytest.mark.parametrize("name", ["hf_quant_config.json", "quantize_config.json", "quant_config.json"])
def test_files_that_quantisers_leave_are_refused(checkpoint: Path, name: str) -> None:
    (checkpoint / name).write_text("{}")
    with pytest.raises(CheckpointError, match=f"already quantised \\({name}"):
        read_layout(checkpoint)


def test_a_quantised_part_of_a_nested_config_is_found(checkpoint: Path) -> None:
    edit_json(checkpoint / "config.json", text_config={"quantization_config": {"quant_method": "gptq"}})
    with pytest.raises(CheckpointError, match="already quantised .*gptq"):
        read_layout(checkpoint)
    edit_json(checkpoint / "config.json", text_config={}, quantization_config=None)
    assert read_layout(checkpoint).index is None


def test_shards_are_those_of_the_index_and_vendor_copies_do_not_count(checkpoint: Path) -> None:
    names = split(checkpoint)
    (checkpoint / "consolidated.safetensors").write_bytes(b"a copy in Mistral's own format")
    (checkpoint / "training_args.bin").write_bytes(b"a pickle that nobody reads")
    layout = read_layout(checkpoint)
    assert [path.name for path in layout.shards] == names


def test_links_into_the_hub_cache_are_what_the_hub_makes(checkpoint: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--o--n/blobs", tmp_path / "models--o--n/snapshots/0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in checkpoint.iterdir():
        path.rename(blobs / path.name)
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    assert [path.name for path in read_layout(snapshot).shards] == ["model.safetensors"]


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_runs_only_when_asked_and_is_listed(checkpoint: Path, file: str) -> None:
    (checkpoint / "modeling_own.py").write_text("raise SystemExit('must not run')")
    edit_json(checkpoint / file, auto_map={"AutoModelForCausalLM": "modeling_own.Own"})
    with pytest.raises(CheckpointError, match=f"{file} asks to run code") as caught:
        read_layout(checkpoint)
    assert "model.trust_remote_code" in caught.value.next_step
    assert [path.name for path in read_layout(checkpoint, trust_remote_code=True).code] == ["modeling_own.py"]
    edit_json(checkpoint / file, auto_map={"AutoModelForCausalLM": "org/other--modeling_own.Own"})
    with pytest.raises(CheckpointError, match="code of another repository"):
        read_layout(checkpoint, trust_remote_code=True)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=40)
@given(content=JSON)
def test_settings_are_an_object_or_a_named_error(content: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "settings.json"
    path.write_text(json.dumps(content))
    if isinstance(content, dict):
        assert read_settings(path) == content
    else:
        with pytest.raises(CheckpointError, match="settings.json"):
            read_settings(path)


@settings(max_examples=40)
@given(content=st.binary(max_size=40))
def test_any_bytes_for_settings(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "bytes.json"
    path.write_bytes(content)
    try:
        assert isinstance(read_settings(path), dict)
    except CheckpointError as error:
        assert "bytes.json" in error.message
