"""A fake library in the place of the real ones."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.unit.engines.tensorrt.fake_tensorrt import make_tensorrt


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """``install("10.9.0")`` or ``install("1.7.1", sms=[89])``: this library and no other is there."""
    for name in ("tensorrt", "tensorrt_rtx", "tensorrt_rtx_bindings"):
        monkeypatch.setitem(sys.modules, name, None)  # an import of it fails

    def make(version: str, *, sms: Sequence[int] = ()) -> Any:
        module = make_tensorrt(version, sms=sms)
        monkeypatch.setitem(sys.modules, "tensorrt_rtx_bindings" if sms else "tensorrt", module)
        return module

    return make
