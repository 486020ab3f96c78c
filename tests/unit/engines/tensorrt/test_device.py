"""The CUDA side on a real GPU, against the fake one that the other tests trust. Without a GPU only the refusal is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pipeline.engines.tensorrt.device import Device
from pipeline.errors import BuildError, ServerError
from tests.unit.engines.tensorrt.fake import FakeDevice

HEADS, WIDTH, CAPACITY, ROWS, SLOTS, TENSORS = 3, 5, 16, 2, 4, 6


def _has_gpu() -> bool:
    try:
        Device()
    except BuildError:
        return False
    return True


@pytest.mark.skipif(_has_gpu(), reason="there is a GPU")
def test_without_a_gpu_the_engine_is_refused() -> None:
    with pytest.raises(BuildError, match="no NVIDIA GPU"):
        Device()


def _device(kind: Any, unit: str, bits: int) -> Any:
    device = kind()
    device.compile(unit, bits)
    return device


def _upload(device: Any, array: np.ndarray) -> int:
    address: int = device.empty(array.nbytes)
    device.put(address, array)
    return address


def _cache(device: Any, bytes_a_token: int) -> list[np.ndarray]:
    """Writes new keys and values of two rows into slots 3 and 1; one row's last token would lie beyond the end."""
    random = np.random.default_rng(2)
    new = [random.integers(0, 256, (ROWS, HEADS, WIDTH, bytes_a_token), np.uint8) for _ in range(TENSORS)]
    regions = [np.full((SLOTS, HEADS, CAPACITY, bytes_a_token), 7, np.uint8) for _ in range(TENSORS)]
    targets = [_upload(device, region) for region in regions]
    tables = [np.array([_upload(device, part) for part in new], np.uint64), np.array(targets, np.uint64)]
    ints = [np.array(values, np.int32) for values in ([3, 1], [CAPACITY - 2, 4], [3, 5])]
    addresses = [_upload(device, array) for array in (*tables, *ints)]
    units = bytes_a_token // {"uint4": 16, "unsigned short": 2}[device.unit]
    device.launch("write_cache", (TENSORS, ROWS, 2), 64, addresses, (HEADS, WIDTH, CAPACITY, units))
    return [device.get(target, region) for target, region in zip(targets, regions, strict=True)]


@pytest.mark.gpu
@pytest.mark.parametrize(("unit", "size"), [("uint4", 128), ("unsigned short", 10)])
def test_new_keys_and_values_go_to_their_places(unit: str, size: int) -> None:
    both = [_device(kind, unit, 16) for kind in (Device, FakeDevice)]
    for device in both:
        device.unit = unit
    for found, expected in zip(*(_cache(device, size) for device in both), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [np.float16, np.float32])
@pytest.mark.parametrize("vocabulary", [85, 1024, 49152])
def test_logits_are_read(kind: Any, vocabulary: int) -> None:
    logits = (np.random.default_rng(4).normal(size=(5, vocabulary)) * 4).astype(kind)
    logits[1, [7, 80]] = 60  # equal ones: the lower id, as NumPy has it
    logits[3, 5] = np.nan
    logits[4, 6] = np.inf
    given = np.array([3, 9, 84, 0, 1], np.int32)
    answers = []
    for device in (_device(Device, "uint4", kind().itemsize * 8), _device(FakeDevice, "uint4", kind().itemsize * 8)):
        addresses = [_upload(device, logits), _upload(device, given), *(device.empty(20) for _ in range(3))]
        device.launch("read_logits", (5, 1, 1), 1024, addresses, (vocabulary,))
        kinds = (np.int32, np.float32, np.float32)
        answers.append([device.get(a, np.empty(5, k)) for a, k in zip(addresses[2:], kinds, strict=True)])
    (best, best_log_prob, given_log_prob), expected = answers
    assert best[:3].tolist() == expected[0][:3].tolist()
    assert best[1] == 7
    np.testing.assert_allclose(best_log_prob[:3], expected[1][:3], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(given_log_prob[:3], expected[2][:3], rtol=1e-4, atol=1e-4)
    assert np.isnan(best_log_prob[3:]).all()


@pytest.mark.gpu
def test_a_recorded_graph_is_replayed_in_order() -> None:
    device = _device(Device, "uint4", 16)
    best, going, ids, lengths = (
        _upload(device, np.array(values, np.int32)) for values in ([5, 6, 7], [1, 0, 1], [0, 0, 0], [4, 4, 4])
    )
    replay = device.record(lambda: device.launch("advance", (1, 1, 1), 256, (best, going, ids, lengths), (3,)))
    assert device.get(lengths, np.empty(3, np.int32)).tolist() == [4, 4, 4]
    for _ in range(3):
        replay()
    landing = device.host((3,), np.int32)
    device.fetch(lengths, landing)
    assert landing.wait().tolist() == [7, 4, 7]
    assert device.get(ids, np.empty(3, np.int32)).tolist() == [5, 6, 7]


@pytest.mark.gpu
def test_lines_are_copied_with_their_pitch_and_memory_is_counted() -> None:
    device = _device(Device, "uint4", 16)
    source = np.arange(60, dtype=np.uint8).reshape(6, 10)
    target = device.empty(6 * 16)
    device.clear(target, 6 * 16)
    device.copy((target, 16), (_upload(device, source), 10), 10, 6)
    found = device.get(target, np.empty((6, 16), np.uint8))
    np.testing.assert_array_equal(found[:, :10], source)
    assert not found[:, 10:].any()
    with pytest.raises(ServerError, match="GiB free"):
        device.empty(2**50)
    device.close()
