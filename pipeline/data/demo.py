"""The demo corpus: English to Spanish interface texts of Home Assistant (Apache-2.0), from its wheel.

The texts are fetched at run time and never committed. Sentences that differ only in names and numbers
(templates: "Set up your X account") are kept once, over the whole corpus, and the split is by component,
so no template and no component is on two sides of it.
"""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.fetch import Wheel, fetch_wheel

CORPUS = Wheel(
    requirement="homeassistant==2026.2.3",
    filename="homeassistant-2026.2.3-py3-none-any.whl",
    digest="sha256:8167820cac4b8defe895fd2c36ac23402a445d1fe6028e8cde24caabb935282c",
    python_version="3.14",
)
LICENCE = "Apache-2.0"
# Per cent of components: about 750 short evaluation items, 500 short calibration items.
SPLITS = {"eval": 15, "calib": 8, "train": 77}
MIN_WORDS = 3
_MARKUP = re.compile(r"[{}\[\]<>%|\n`*_\\]|https?:")
_COMPONENT = re.compile(r"homeassistant/components/([^/]+)/translations/en\.json")


def load_demo(split: str) -> list[dict[str, Any]]:
    """Rows ``{id, source, target, group}`` of one split, in a fixed order.

    ``id`` is ``component/key``, ``group`` the component.
    """
    if split not in SPLITS:
        raise KeyError(f"the demo corpus has the splits {sorted(SPLITS)}, not {split!r}")
    rows = _deduplicated(_pairs(fetch_wheel(CORPUS)))
    return [row for row in rows if _split_of(row["group"]) == split]


def _pairs(wheel: Path) -> Iterator[dict[str, Any]]:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        for name in sorted(names):
            match = _COMPONENT.fullmatch(name)
            spanish = name.replace("/en.json", "/es.json")
            if match is None or spanish not in names:
                continue
            targets = dict(_flatten(json.loads(archive.read(spanish))))
            for key, source in _flatten(json.loads(archive.read(name))):
                target = targets.get(key)
                if target is not None and _usable(source, target):
                    yield {
                        "id": f"{match[1]}/{key}",
                        "source": source.strip(),
                        "target": target.strip(),
                        "group": match[1],
                    }


def _flatten(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", str(value)


def _usable(source: str, target: str) -> bool:
    return source != target and not _MARKUP.search(source + target) and len(source.split()) >= MIN_WORDS


def _template(text: str) -> str:
    """``text`` with names (capitalised words past the first) and numbers replaced by ``#``."""
    words = re.findall(r"[\w']+", text)
    return " ".join(
        "#" if any(map(str.isdigit, word)) or (place and word[0].isupper()) else word.lower()
        for place, word in enumerate(words)
    )


def _deduplicated(rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    seen: set[str] = set()
    for row in rows:
        template = _template(row["source"])
        if template not in seen:
            seen.add(template)
            yield row


def _split_of(component: str) -> str:
    place = int(hashlib.sha256(component.encode()).hexdigest(), 16) % 100
    for split, share in SPLITS.items():
        if place < share:
            return split
        place -= share
    raise AssertionError("the shares add up to 100")
