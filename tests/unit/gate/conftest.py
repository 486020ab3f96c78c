"""A factory of evidence: sound in every respect but those that a test changes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from pipeline.gate.evidence import Evidence
from pipeline.records import Arm, Item, Record

DIGEST = "sha256:engine"
WORDS = ["the", "light", "in", "kitchen", "is", "now", "on", "off", "door", "opens", "your", "device", "was", "found"]


def sentences(count: int, seed: int = 1) -> list[str]:
    """Sentences of 5 to 9 words, all different by their last word."""
    source = random.Random(seed)
    return [" ".join([*source.choices(WORDS, k=source.randint(4, 8)), f"w{place}"]) for place in range(count)]


def spoiled(texts: Sequence[str], share: float, seed: int = 2) -> list[str]:
    """The texts with every word of a random ``share`` of them replaced, lengths kept."""
    source = random.Random(seed)
    chosen = set(source.sample(range(len(texts)), round(share * len(texts))))
    return [
        " ".join(f"z{turn}" for turn, _ in enumerate(text.split())) if place in chosen else text
        for place, text in enumerate(texts)
    ]


def records_of(texts: Sequence[str]) -> list[Record]:
    """A record for each text; every word is a token."""
    return [
        Record(f"i{place:04d}", (1, place), tuple(hash_word(word) for word in text.split()), text, "stop")
        for place, text in enumerate(texts)
    ]


def hash_word(word: str) -> int:
    """A token id that is the same in every process."""
    return sum(ord(char) * 31**place for place, char in enumerate(word)) % 50_000


def arm_of(role: str, **more: Any) -> Arm:
    """The description of a sound arm."""
    engine = role in ("runtime", "candidate")
    fields: dict[str, Any] = {
        "name": role,
        "role": role,
        "backend": "onnxruntime" if engine else "vllm",
        "dtype": "int8" if role == "candidate" else "float32",
        "engine_digest": DIGEST if role == "candidate" else None,
        "tokenizer_fingerprint": "sha256:tok",
        "template_fingerprint": "sha256:tpl",
        "sampling": {"temperature": 0.0, "max_new_tokens": 64, "stop_token_ids": [2]},
        "versions": {"x": "1"},
        "platform": {"gpu": None, "sm": None, "tensorrt": None, "cpu": "any"},
        "order_seed": 1 if role == "repeat" else 0,
        "recipe": "int8" if role == "candidate" else None,
    }
    return Arm(**(fields | more))


def build_evidence(
    candidate: Sequence[str],
    *,
    baseline: Sequence[str] | None = None,
    references: Sequence[str] | None = None,
    runtime: Sequence[str] | None = None,
    repeat: Sequence[str] | None = None,
    groups: Sequence[str | None] | None = None,
    **more: Any,
) -> Evidence:
    """Evidence about answers; a text that is not given is like the candidate's count of sentences."""
    texts = list(references) if references is not None else sentences(len(candidate))
    base = list(baseline) if baseline is not None else texts
    items = [
        Item(f"i{place:04d}", text, text, (1, place), groups[place] if groups else None)
        for place, text in enumerate(texts)
    ]
    answers = {"baseline": base, "repeat": repeat or base, "candidate": candidate}
    if runtime is not None:
        answers["runtime"] = runtime
    arms = {role: (arm_of(role), records_of(given)) for role, given in answers.items()}
    evidence = Evidence(
        recipe="int8",
        items=items,
        arms=arms,
        manifest={
            "digest": DIGEST,
            "recipe": "int8",
            "platform": {"gpu": None, "sm": None, "tensorrt": None},
            "sources": {"checkpoint": "sha256:ckpt"},
        },
        census={"quantized": 210, "promised": 210, "skipped": [], "bad": []},
        card={"leakage": {"overlaps": []}},
    )
    return replace(evidence, **more)


@pytest.fixture(scope="session")
def make() -> Callable[..., Evidence]:
    """``build_evidence``."""
    return build_evidence


@pytest.fixture(scope="session")
def tools() -> dict[str, Callable[..., Any]]:
    """The other helpers by name."""
    return {"sentences": sentences, "spoiled": spoiled, "records_of": records_of, "arm_of": arm_of}
