"""The section ``bench`` of params.yaml: mistakes are named, every key of it and of prices.yaml is documented."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from pipeline.bench.fleet import PriceFile
from pipeline.errors import ConfigError
from pipeline.params import Bench, load_params

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bench: {kinds: [sweep, sweep]}", r"bench\.kinds: a kind stands twice"),
        ("bench: {kinds: [burst]}", r"bench\.kinds\.0: "),
        ("bench: {kinds: [replay]}", r"bench\.replay\.file: name the trace"),
        ("bench: {engines: [other]}\nrecipes: [int8_sq]", r"bench\.engines: other is not in recipes"),
        ("bench: {repeats: 0}", r"bench\.repeats: must be at least 1"),
        ("bench: {new_tokens: 1}", r"bench\.new_tokens: must be at least 2"),
        ("bench: {timeout_s: 0}", r"bench\.timeout_s: must be more than 0"),
        ("bench: {max_lag_ms: 0}", r"bench\.max_lag_ms: must be more than 0"),
        ("bench: {warmup: -1}", r"bench\.warmup: must be 0 or more"),
        ("bench: {workers: 65}", r"bench\.workers: must be between 0"),
        ("bench: {sweep: {concurrency: []}}", r"bench\.sweep\.concurrency: name at least one"),
        ("bench: {sweep: {concurrency: [4, 4]}}", r"bench\.sweep\.concurrency: a number stands twice"),
        ("bench: {sweep: {concurrency: [0]}}", r"bench\.sweep\.concurrency: must be at least 1"),
        ("bench: {poisson: {requests_per_s: [0]}}", r"bench\.poisson\.requests_per_s: must be more than 0"),
        ("bench: {constant: {seconds: 0}}", r"bench\.constant\.seconds: must be more than 0"),
        ("bench: {spike: {base: 50, peak: 40}}", r"bench\.spike\.peak: must be more than base"),
        ("bench: {spike: {scale: 0}}", r"bench\.spike\.scale: must be more than 0"),
        ("bench: {replay: {speed: 0}}", r"bench\.replay\.speed: must be more than 0"),
        ("bench: {replay: {unit: us}}", r"bench\.replay\.unit: "),
        ("bench: {spikes: {}}", r"bench\.spikes: unknown key"),
    ],
)
def test_mistakes(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(text + "\n")
    with pytest.raises(ConfigError, match=r"params\.yaml:1: " + message):
        load_params(path)


def test_the_default_is_no_load_and_the_demos_is_small() -> None:
    assert Bench().kinds == ()
    demo = load_params(ROOT / "params.yaml").bench
    seconds = len(demo.sweep.concurrency) * demo.sweep.seconds
    seconds += demo.spike.before_s + demo.spike.peak_s + demo.spike.after_s
    assert demo.engines is not None
    assert seconds * (1 + len(demo.engines)) * demo.repeats <= 75


def keys(kind: Any, before: str = "") -> set[str]:
    found: set[str] = set()
    types = get_type_hints(kind)
    for field in fields(kind):
        if is_dataclass(types[field.name]):
            found |= keys(types[field.name], f"{before}{field.name}.")
        else:
            found.add(before + field.name)
    return found


@pytest.mark.parametrize(("page", "kind", "before"), [("params.md", Bench, "bench."), ("prices.md", PriceFile, "")])
def test_every_key_is_documented(page: str, kind: Any, before: str) -> None:
    """A key stands in backticks as ``a.b``, or in ``a.{b,c}``."""
    documented: set[str] = set()
    for span in re.findall(r"`([^`]+)`", (ROOT / "docs" / page).read_text()):
        head, _, names = span.partition("{")
        documented |= (
            {head + name for name in names.rstrip("}").split(",")} if names else {span.removesuffix(".DEVICE")}
        )
    assert keys(kind, before) <= documented
