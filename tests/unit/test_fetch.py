"""Wheels are pinned by digest."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from pipeline.errors import InputError
from pipeline.fetch import Wheel, fetch_wheel


def test_a_cached_wheel_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINEGATE_CACHE", str(tmp_path))
    (tmp_path / "x.whl").write_bytes(b"wheel")
    good = Wheel("x==1", "x.whl", "sha256:" + hashlib.sha256(b"wheel").hexdigest())
    assert fetch_wheel(good) == tmp_path / "x.whl"
    with pytest.raises(InputError, match="the demo pins sha256:00"):
        fetch_wheel(Wheel("x==1", "x.whl", "sha256:00"))


def test_a_failed_download_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINEGATE_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # pip answers at once, without a network
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(InputError, match=r"pip could not download no-such-wheel==1"):
        fetch_wheel(Wheel("no-such-wheel==1", "no.whl", "sha256:00"))
    assert list(tmp_path.iterdir()) == []
