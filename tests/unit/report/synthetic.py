"""A finished run with plausible numbers, judged by the real gate.

Answers are references with words dropped or replaced: the baseline a little, `int8_mixed` as much but elsewhere,
`int8_sq` more. Everything is written where the stages write it, through the same functions.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

from pipeline.bench.fleet import load_prices
from pipeline.bench.records import write_bench
from pipeline.engines.manifest import write_manifest
from pipeline.files import digest_json, read_json, write_json
from pipeline.gate.evidence import Evidence
from pipeline.gate.policy import Policy
from pipeline.gate.verdict import decide
from pipeline.records import Arm, Item, Record, Timing, write_answers, write_items
from tests.unit.bench.simulate import Machine, benched

ROOT = Path(__file__).parents[3]

WORDS = (
    *("luz", "cocina", "puerta", "casa", "temperatura", "dispositivo", "cuenta"),
    *("estado", "integración", "sensor", "red", "clave", "zona", "tiempo"),
)
RECIPES = ("int8_sq", "int8_mixed")
DEVICE = {"gpu": None, "sm": None, "driver": None, "cuda": None, "tensorrt": None, "cpu": "x86_64 avx2 avx512 vnni"}
POLICY = Policy(resamples=2000)


def make_items(count: int) -> list[Item]:
    """Sentences of 4 to 9 words in groups of four."""
    order = random.Random(3)
    rows = []
    for place in range(count):
        words = order.choices(WORDS, k=order.randint(4, 9))
        reference = f"{' '.join(words)} {place}."
        prompt = tuple(order.choices(range(3, 9000), k=14 + len(words)))
        rows.append(
            Item(f"part{place // 4}/{place:04d}", f"source {reference}", reference, prompt, f"part{place // 4}")
        )
    return rows


def spoil(text: str, order: random.Random) -> str:
    """One word dropped, or replaced by another."""
    words = text.split()
    place = order.randrange(len(words))
    words[place : place + 1] = [] if len(words) > 2 and order.random() < 0.4 else [order.choice(WORDS)]
    return " ".join(words)


def changed(texts: list[str], share: float, originals: list[str], seed: int, heal: float = 0.5) -> list[str]:
    """A share of the texts changed: spoiled further, or (``heal``) nearer to the original."""
    order = random.Random(seed)
    found = []
    for text, original in zip(texts, originals, strict=True):
        if order.random() >= share * (0.15 if text == original and heal > 0.5 else 1.0):
            found.append(text)
        else:
            found.append(spoil(original if order.random() < heal else text, order))
    return found


def write_run(root: Path, items: list[Item] | None = None, count: int = 200, **texts: list[str]) -> Policy:
    """Writes a run into ``root``; ``texts`` replaces the answers of arms by name."""
    ready = items is not None
    rows = items if items is not None else make_items(count)
    references = [item.reference for item in rows]
    order = random.Random(5)
    baseline = [
        reference if order.random() < 0.15 else spoil(spoil(reference, order), order) for reference in references
    ]
    answers = {
        "baseline": baseline,
        "repeat": changed(baseline, 0.02, references, 7),
        "runtime": changed(baseline, 0.03, references, 8),
        "int8_mixed": changed(baseline, 0.3, references, 9, heal=0.66),
        "int8_sq": changed(baseline, 0.6, references, 10, heal=0.15),
        **texts,
    }
    if not ready:
        _write_sources(root, rows)
    digests = {name: _engine(root, name) for name in ("runtime", *RECIPES)}
    arms = {}
    for place, (name, lines) in enumerate(answers.items()):
        arms[name] = _write_arm(root, name, rows, lines, digest=digests.get(name), place=place)
    benches = _write_bench(root, digests)
    for recipe in RECIPES:
        roles = {"baseline": "baseline", "repeat": "repeat", "runtime": "runtime", "candidate": recipe}
        evidence = Evidence(
            recipe=recipe,
            items=rows,
            arms={role: arms[name] for role, name in roles.items()},
            manifest=read_json(root / f"engines/{recipe}/manifest.json"),
            census=read_json(root / f"artifacts/quantized/{recipe}/census.json"),
            card=read_json(root / "calib_data/card.json"),
            bench={"baseline": benches["baseline"], "candidate": benches[recipe]},
            prices=load_prices(root / "prices.yaml").prices,
        )
        write_json(root / f"artifacts/verdicts/{recipe}.json", decide(evidence, POLICY).plain())
    return POLICY


def _write_bench(root: Path, digests: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Three repeats: the engines are faster than the baseline, and meet the spike with fewer rows."""
    shutil.copy(ROOT / "prices.yaml", root)
    speeds = {"baseline": (8, 0.05, 0.03), "int8_mixed": (4, 0.03, 0.012), "int8_sq": (4, 0.03, 0.011)}
    arms = {
        name: benched(
            name,
            [Machine(rows, first * spread, token * spread) for spread in (1.0, 1.03, 0.98)],
            digests.get(name),
        )
        for name, (rows, first, token) in speeds.items()
    }
    write_bench(root / "artifacts/bench", arms, [*arms, *reversed(arms), *arms])
    return {name: arm.plain() for name, arm in arms.items()}


def _write_sources(root: Path, items: list[Item]) -> None:
    write_items(root / "calib_data/eval.jsonl", items)
    write_json(
        root / "calib_data/card.json",
        {
            "source": {"kind": "demo", "corpus": digest_json("corpus"), "log": {"pattern": "logs/*.jsonl"}},
            "revision": None,
            "licence": "Apache-2.0",
            "counts": {
                **{"calib_asked": 256, "calib_used": 250, "calib_rows": 300, "calib_left_out_duplicate": 7},
                **{"eval_asked": len(items), "eval_used": len(items), "eval_rows": 999},
            },
            "tokens": {"calibration": 11546, "evaluation": 16974},
            "histogram": {"calibration": {"24": 50, "32": 120, "40": 80}, "evaluation": {"16": 95, "24": 105}},
            "lengths": {
                "profile": "evaluation",
                "distance": {
                    "before": {"ks": 0.25, "wasserstein": 7.5},
                    "after": {"ks": 0.021, "wasserstein": 0.44},
                },
                "moved": 3,
            },
            "complete": {"calibration": False, "evaluation": True},
            "log": {"lines": 12345, "unusable_lines": {"not JSON": 2}},
            "redaction": {"redactors": {"email": "built-in"}, "changed": 17, "dropped": 1},
            "leakage": {"matches": {}, "overlaps": [], "rule": "equal texts"},
            "digests": {"calibration": digest_json("calibration"), "evaluation": digest_json("evaluation")},
        },
    )
    write_json(
        root / "artifacts/checkpoint.json",
        {
            **{"architecture": "LlamaForCausalLM", "parameters": 134515008, "layers": 3},
            "fingerprints": {"weights": digest_json("weights")},
        },
    )
    write_json(root / "artifacts/platform.json", {"device": DEVICE, "backends": {}})
    (root / "artifacts/checkpoint").mkdir(parents=True)
    config = '{"num_hidden_layers": 30, "hidden_size": 576}'
    (root / "artifacts/checkpoint/config.json").write_text(config)
    (root / "artifacts/checkpoint/model.safetensors").write_bytes(bytes(5000 - len(config)))
    for recipe in RECIPES:
        kinds = ("q_proj", "o_proj", "up_proj", *(("down_proj",) if recipe == "int8_sq" else ()))
        names = [f"model.layers.{layer}.{kind}" for layer in range(3) for kind in kinds]
        layers = [
            {"layer": name, "weight_amax": 0.5 + place, "input_amax": 1.0, "pre_quant_scale_max": 10.0 * (place + 1)}
            for place, name in enumerate(names)
        ]
        census = {"promised": len(names), "quantized": len(names), "skipped": ["lm_head"], "unexpected": [], "bad": []}
        write_json(root / f"artifacts/quantized/{recipe}/census.json", census | {"layers": layers})


def _engine(root: Path, name: str) -> str:
    folder = root / "engines" / name
    if (folder / "manifest.json").exists():
        return str(read_json(folder / "manifest.json")["digest"])
    folder.mkdir(parents=True)
    (folder / "model.onnx").write_bytes(bytes({"runtime": 4000, "int8_sq": 1500, "int8_mixed": 2200}[name]))
    recipe = None if name == "runtime" else name
    build = {"probe": {"mean_kl": 0.0015, "max_kl": 0.0095, "top1": 0.979}, "versions": {"onnxruntime": "1.32.0"}}
    description = {"name": name, "recipe": recipe, "backend": "onnxruntime", "dtype": "int8 (rest float32)"}
    description |= {"limits": {"max_batch": 16}, "sources": {"checkpoint": {"weights": "sha256:w"}}, "platform": DEVICE}
    return str(write_manifest(folder, description | {"build": build})["digest"])


def _write_arm(
    root: Path, name: str, items: list[Item], texts: list[str], *, digest: str | None, place: int
) -> tuple[Arm, list[Record]]:
    baseline = name in ("baseline", "repeat")
    common: dict[str, Any] = {
        "tokenizer_fingerprint": "sha256:t",
        "template_fingerprint": "sha256:c",
        "sampling": {"temperature": 0.0, "max_new_tokens": 64, "stop_token_ids": [2]},
        "platform": DEVICE,
    }
    arm = Arm(
        name=name,
        role=name if name in ("baseline", "repeat", "runtime") else "candidate",
        backend="vllm" if baseline else "onnxruntime",
        dtype="float32" if baseline or name == "runtime" else "int8 (rest float32)",
        engine_digest=digest,
        versions={"vllm": "0.32.0+cpu", "torch": "2.11.0"} if baseline else {"onnxruntime": "1.32.0"},
        order_seed=place,
        recipe=name if name in RECIPES else None,
        wall_s=50.0 + 10 * place,
        **common,
    )
    records = [
        Record(item.id, item.prompt_token_ids, tuple(len(word) + 3 for word in text.split()), text, "stop")
        for item, text in zip(items, texts, strict=True)
    ]
    timings = [
        Timing(record.id, None, 0.4 + 0.001 * turn * (place + 1), len(record.output_token_ids))
        for turn, record in enumerate(records)
    ]
    write_answers(root / "artifacts/answers" / name, arm, records, timings)
    return arm, records
