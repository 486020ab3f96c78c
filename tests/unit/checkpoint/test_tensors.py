"""The weights are read once, a tensor at a time, and every fault names the tensor."""

from __future__ import annotations

import gc
import hashlib
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint import tensors
from pipeline.checkpoint.layout import INDEX, read_layout
from pipeline.checkpoint.tensors import read_headers, scan_tensors, weights_fingerprint
from pipeline.errors import CheckpointError
from tests.unit.checkpoint.conftest import edit_json, edit_tensors, split

UP = "model.layers.1.mlp.up_proj.weight"


def _scan(folder: Path) -> dict[str, tensors.Stored]:
    layout = read_layout(folder)
    return scan_tensors(layout, read_headers(layout))


def test_every_tensor_is_read_and_hashed(checkpoint: Path) -> None:
    from safetensors.numpy import load_file

    found = _scan(checkpoint)
    expected = load_file(checkpoint / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].sha256 == hashlib.sha256(values.tobytes()).hexdigest()
        assert found[name].largest == pytest.approx(float(abs(values).max()))
        assert found[name].shape == values.shape


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_nan_and_infinity_are_refused_by_name(checkpoint: Path, value: float, dtype: str) -> None:
    import torch

    def spoil(found: dict[str, Any]) -> None:
        found[UP] = found[UP].to(getattr(torch, dtype))
        found[UP][3, :2] = value

    edit_tensors(checkpoint, spoil)
    with pytest.raises(CheckpointError, match=r"model.safetensors: .*up_proj.weight: 2 of 32768 values are NaN or inf"):
        _scan(checkpoint)


@pytest.mark.parametrize("workers", [1, 4])
def test_memory_is_one_tensor_for_each_worker(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    """Issue 4: peak memory of one shard at most. Every tensor that a shard hands out is watched until it is freed."""
    split(checkpoint, parts=4)
    monkeypatch.setattr(tensors, "_WORKERS", workers)
    monkeypatch.setattr(tensors.os, "cpu_count", lambda: workers)
    real = tensors._opened
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    most: list[int] = []
    whole: list[str] = []

    class Watched:
        def __init__(self, path: Path) -> None:
            self.shard = real(path)

        def __enter__(self) -> Watched:
            self.shard.__enter__()
            return self

        def __exit__(self, *error: object) -> None:
            self.shard.__exit__(*error)

        def __getattr__(self, name: str) -> Any:
            whole.append(name)
            return getattr(self.shard, name)

        def get_tensor(self, name: str) -> Any:
            tensor = self.shard.get_tensor(name)
            alive.add(tensor)
            most.append(len(alive))
            return tensor

    monkeypatch.setattr(tensors, "_opened", Watched)
    gc.disable()  # nothing may wait for the collector
    try:
        found = _scan(checkpoint)
    finally:
        gc.enable()
    assert len(most) == len(found) == 20
    assert max(most) <= workers
    assert set(whole) <= {"keys", "get_slice"}  # no call that loads a shard


def test_the_fingerprint_does_not_depend_on_the_shards(checkpoint: Path) -> None:
    before = weights_fingerprint(_scan(checkpoint))
    split(checkpoint)
    assert weights_fingerprint(_scan(checkpoint)) == before
    edit_tensors(checkpoint, lambda found: next(iter(found.values())).add_(1), "model-00002-of-00003.safetensors")
    assert weights_fingerprint(_scan(checkpoint)) != before


def test_the_fingerprint_knows_shape_and_dtype(checkpoint: Path) -> None:
    """Zeros have the same bytes in any shape."""
    import torch

    digests = set()
    for value in (torch.zeros(4, 8), torch.zeros(8, 4), torch.zeros(4, 16, dtype=torch.float16)):
        edit_tensors(checkpoint, lambda found, value=value: found.update(extra=value))
        digests.add(weights_fingerprint(_scan(checkpoint)))
    assert len(digests) == 3


def _cut(folder: Path, keep: float) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: int(keep * len(whole))])


def _pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")


def _moved(folder: Path) -> None:
    names = split(folder)
    index = dict.fromkeys(read_headers(read_layout(folder)), names[0])
    edit_json(folder / INDEX, weight_map=index | {"x": names[1], "y": names[2]})


def _twice(folder: Path) -> None:
    names = split(folder)
    (folder / names[1]).write_bytes((folder / names[0]).read_bytes())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: _cut(folder, 0.5), "model.safetensors: damaged"),
        (lambda folder: _cut(folder, 0.00001), "model.safetensors: damaged"),
        (lambda folder: _cut(folder, 0), "model.safetensors: damaged"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\x80\x04pickle in disguise"), "damaged"),
        (_pointer, "a Git LFS pointer"),
        (_moved, "the index says that .* is in model-00001-of-00003.safetensors, but it is in model-0000[23]"),
        (_twice, "stands in model-00001-of-00003.safetensors and in model-00002-of-00003.safetensors"),
    ],
)
def test_damaged_shards_are_refused(checkpoint: Path, spoil: Callable[[Path], Any], message: str) -> None:
    spoil(checkpoint)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_headers(read_layout(checkpoint))
    assert caught.value.next_step


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (UP, "float8_e4m3fn"),  # DeepSeek's and compressed-tensors' FP8
        (UP, "int8"),  # bitsandbytes, SmoothQuant exports
        (UP, "uint8"),  # 4-bit formats
        ("model.layers.0.mlp.up_proj.qweight", "int32"),  # GPTQ and AWQ
        ("model.layers.0.mlp.up_proj.weight_scale_inv", "float32"),
        ("model.layers.0.mlp.up_proj.weight.absmax", "float32"),  # bitsandbytes
        ("model.layers.0.mlp.input_quantizer._amax", "float32"),  # ModelOpt
    ],
)
def test_quantised_tensors_are_refused_without_a_config_that_says_so(checkpoint: Path, name: str, dtype: str) -> None:
    import torch

    edit_tensors(checkpoint, lambda found: found.update({name: torch.zeros(8, 8).to(getattr(torch, dtype))}))
    with pytest.raises(CheckpointError, match=f"already quantised .*{name}"):
        read_headers(read_layout(checkpoint))
