"""The demo corpus: read from a wheel, cleaned, without template twins, split by component."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from pipeline.data import demo
from pipeline.fetch import Wheel

TEXTS: dict[str, dict[str, tuple[str, str]]] = {
    "alpha": {
        "good": ("Set up your Alpha account", "Configura tu cuenta de Alpha"),
        "short": ("Two words", "Dos palabras"),
        "markup": ("Use the {name} placeholder", "Usa el marcador {name}"),
        "same": ("Wi-Fi in AP mode", "Wi-Fi in AP mode"),
    },
    "beta": {"twin": ("Set up your Beta account", "Configura tu cuenta de Beta")},
    "gamma": {"other": ("The device is not reachable", "El dispositivo no está accesible")},
}


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "corpus.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for component, texts in TEXTS.items():
            for place, language in enumerate(("en", "es")):
                tree: dict[str, Any] = {"config": {key: pair[place] for key, pair in texts.items()}}
                archive.writestr(f"homeassistant/components/{component}/translations/{language}.json", json.dumps(tree))
    digest = "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setenv("ENGINEGATE_CACHE", str(tmp_path))
    monkeypatch.setattr(demo, "CORPUS", Wheel("x==1", "corpus.whl", digest))


@pytest.mark.usefixtures("corpus")
def test_rows_are_clean_and_each_template_stands_once() -> None:
    rows = [row for split in demo.SPLITS for row in demo.load_demo(split)]
    assert sorted(row["id"] for row in rows) == ["alpha/config/good", "gamma/config/other"]
    assert rows[0].keys() == {"id", "source", "target", "group"}


@pytest.mark.usefixtures("corpus")
def test_a_component_is_on_one_side_only() -> None:
    groups = [{row["group"] for row in demo.load_demo(split)} for split in demo.SPLITS]
    assert sum(map(len, groups)) == len(set().union(*groups))


def test_the_shares_add_up() -> None:
    assert sum(demo.SPLITS.values()) == 100
    with pytest.raises(KeyError, match="'test'"):
        demo.load_demo("test")
