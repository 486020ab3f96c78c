"""Stage ``bench``: the baseline and the engines under load, side by side. ``python -m stages.bench``

One stage for all arms. A repeat benches every arm, each on a fresh server, and the next repeat goes through them
backwards, so that what drifts in a machine (heat, neighbours, clocks) strikes all arms alike. Numbers of one arm taken
on another day would be cheaper, and no comparison; so a changed engine benches them all again. What only the gate
reads (metrics, margins) does not.

Writes ``artifacts/bench``; without ``bench.kinds`` in params.yaml it holds no arm. Server logs stay in ``logs/``.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.bench.gpus import find_nvml
from pipeline.bench.load import Prompts, make_loads
from pipeline.bench.records import FOLDER, ArmBench, write_bench
from pipeline.bench.run import Setting, bench_arm, in_turn, line
from pipeline.bench.workers import client
from pipeline.engines.manifest import read_manifest
from pipeline.files import atomic_folder, read_json
from pipeline.gate.policy import Policy, load_policy
from pipeline.params import Params, load_params
from pipeline.records import read_items
from pipeline.serving.arms import ENGINES, serving
from pipeline.serving.vllm import vllm_dtype
from stages._main import stage

ITEMS = Path("calib_data/eval.jsonl")
BASELINE = "baseline"
BAR = "{desc}: {percentage:3.0f}%|{bar}| {n:.0f} of {total:.0f} s of load"


def main() -> None:
    params, policy = load_params(), load_policy()
    names = [BASELINE, *(params.recipes if params.bench.engines is None else params.bench.engines)]
    device = read_json(Path("artifacts/platform.json"))["device"]
    arms = {name: ArmBench(_about(name, params, policy, device)) for name in names} if params.bench.kinds else {}
    order = _bench(arms, params, policy, device.get("gpu") is not None) if arms else []
    with atomic_folder(FOLDER) as part:
        write_bench(part, arms, order)
    if not arms:
        print("no load: bench.kinds in params.yaml is empty")


def _bench(arms: dict[str, ArmBench], params: Params, policy: Policy, gpu: bool) -> list[str]:
    """Fills ``arms`` with runs; returns their order."""
    from tqdm import tqdm

    prompts = Prompts(read_items(ITEMS), params.bench.new_tokens, params.engine.max_tokens)
    repeats = [make_loads(params.bench, prompts, params.seed, repeat) for repeat in range(params.bench.repeats)]
    total = len(arms) * sum(load.seconds for loads in repeats for load in loads)
    order = []
    with client() as workers, tqdm(total=total, desc="bench", bar_format=BAR, mininterval=5) as bar:
        setting = Setting(params.bench, policy.service, workers, find_nvml())
        for repeat, loads in enumerate(repeats):
            for name in in_turn(list(arms), repeat):
                order.append(name)
                for run in bench_arm(partial(serving, name, params, gpu), loads, setting, repeat):
                    arms[name].runs.append(run)
                    bar.update(run.numbers["seconds"])
                    tqdm.write(f"{name}, repeat {repeat + 1}: {line(run)}")
    return order


def _about(name: str, params: Params, policy: Policy, device: dict[str, Any]) -> dict[str, Any]:
    """What is benched, and under which settings."""
    bench: dict[str, Any] = {"settings": asdict(params.bench), "device": device, "cores": os.cpu_count()}
    bench["service"] = policy.plain()["service"]
    if name == BASELINE:
        return bench | {
            "arm": name,
            "backend": "vllm",
            "dtype": vllm_dtype(params.baseline, device.get("gpu") is not None),
            "engine_digest": None,
            "limits": {"max_tokens": params.engine.max_tokens},
        }
    manifest = read_manifest(ENGINES / name)
    return bench | {
        "arm": name,
        "backend": manifest["backend"],
        "dtype": manifest["dtype"],
        "engine_digest": manifest["digest"],
        "limits": manifest["limits"],
    }


if __name__ == "__main__":
    stage(main)
