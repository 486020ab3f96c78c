"""``enginegate bench``: load on one server, outside of `dvc repro`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.bench.load import Prompts
    from pipeline.params import Bench, Params
    from pipeline.serving.process import Server

KINDS = ("sweep", "constant", "poisson", "spike", "replay")
EPILOG = """\
An ARM is `baseline` or an engine's name (its server is started as params.yaml says), or the URL of a server. Prompts
are those of the evaluation set, or random token ids (--prompt-tokens). What is not given comes from the section `bench`
of params.yaml. Exit code 3: the client lagged, so the numbers are INVALID.

examples:
  enginegate bench int8_mixed --kind sweep --concurrency 1 8 --seconds 10
  enginegate bench http://127.0.0.1:8000 --kind poisson --rate 20 --prompt-tokens 128 --new-tokens 64 --json
  enginegate bench baseline --kind replay --trace trace.jsonl --output bench-out
"""


def register(subparsers: Any) -> None:
    """Declares the command."""
    parser = subparsers.add_parser(
        "bench",
        help="latency, throughput and failures of one server under load",
        description="Sends one or more kinds of load to a server and prints what it saw.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("arm", metavar="ARM", help="baseline, an engine's name, or a URL")
    parser.add_argument("--kind", nargs="+", choices=KINDS, help="default: bench.kinds of params.yaml")
    parser.add_argument("--concurrency", type=int, nargs="+", metavar="N", help="points of the sweep")
    parser.add_argument("--rate", type=float, nargs="+", metavar="R", help="requests a second (constant, poisson)")
    parser.add_argument("--seconds", type=float, metavar="S", help="of each point (sweep, constant, poisson)")
    parser.add_argument("--scale", type=float, metavar="X", help="of the spike")
    parser.add_argument("--trace", metavar="FILE", help="JSONL to replay")
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="on fresh servers (default 1)")
    parser.add_argument("--new-tokens", type=int, metavar="N", help="of each answer")
    parser.add_argument("--warmup", type=int, metavar="N", help="requests before each load that are not counted")
    parser.add_argument("--workers", type=int, metavar="N", help="client processes; 0: as many as needed")
    parser.add_argument("--items", type=Path, default=Path("calib_data/eval.jsonl"), metavar="FILE", help="prompts")
    parser.add_argument("--prompt-tokens", type=int, metavar="N", help="random prompts of N token ids instead")
    parser.add_argument("--vocabulary", type=int, default=10_000, metavar="N", help="of random prompts (10000)")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="write bench.json, requests and telemetry here")
    parser.add_argument("--json", action="store_true", help="print bench.json")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Benches the server, prints a line a run; returns 3 when a run is invalid."""
    import json
    import sys
    from contextlib import redirect_stdout

    from pipeline.bench.gpus import find_nvml
    from pipeline.bench.load import make_loads
    from pipeline.bench.records import ArmBench, write_bench
    from pipeline.bench.run import Setting, bench_arm, line
    from pipeline.bench.workers import client
    from pipeline.gate.policy import POLICY_FILE, Policy, load_policy
    from pipeline.params import PARAMS_FILE, Params, load_params

    params = load_params() if PARAMS_FILE.exists() else Params()
    policy = load_policy() if POLICY_FILE.exists() else Policy()
    bench = settings(args, params.bench)
    # Lines go to stderr when JSON is asked for: servers print their state too.
    with redirect_stdout(sys.stderr if args.json else sys.stdout), client() as workers:
        nvml = find_nvml()
        name, serve = _server(args.arm, params, nvml is not None)
        prompts = _prompts(args, bench, params)
        arm = ArmBench(about(name, args.arm, bench, policy, params))
        setting = Setting(bench, policy.service, workers, nvml)
        for repeat in range(bench.repeats):
            for one in bench_arm(serve, make_loads(bench, prompts, params.seed, repeat), setting, repeat):
                arm.runs.append(one)
                print(line(one), flush=True)
        if args.output:
            write_bench(args.output, {name: arm}, [name] * bench.repeats)
            print(f"written: {args.output / name}")
    if args.json:
        print(json.dumps(arm.plain(), indent=2))
    return 0 if all(one.numbers["client"]["valid"] for one in arm.runs) else 3


def settings(args: argparse.Namespace, bench: Bench) -> Bench:
    """The section ``bench`` with what the command line says instead. Raises UsageError for values that it refuses."""
    from dataclasses import replace

    from pipeline.errors import UsageError

    try:
        rates: dict[str, Any] = {"requests_per_s": tuple(args.rate)} if args.rate else {}
        seconds: dict[str, Any] = {} if args.seconds is None else {"seconds": args.seconds}
        slots: dict[str, Any] = {"concurrency": tuple(args.concurrency)} if args.concurrency else {}
        given = {name: getattr(args, name) for name in ("new_tokens", "warmup", "workers")}
        changed = replace(
            bench,
            sweep=replace(bench.sweep, **slots, **seconds),
            constant=replace(bench.constant, **rates, **seconds),
            poisson=replace(bench.poisson, **rates, **seconds),
            spike=replace(bench.spike, **({} if args.scale is None else {"scale": args.scale})),
            replay=replace(bench.replay, **({} if args.trace is None else {"file": args.trace})),
            repeats=args.repeats,
            **{name: value for name, value in given.items() if value is not None},
        )
        changed = replace(changed, kinds=tuple(args.kind or bench.kinds))
    except ValueError as error:
        raise UsageError(str(error), "see `enginegate bench --help`") from error
    if not changed.kinds:
        raise UsageError("no load is named", f"--kind {' | '.join(KINDS)}")
    return changed


def about(name: str, arm: str, bench: Bench, policy: Any, params: Params) -> dict[str, Any]:
    """What is benched."""
    import os
    from dataclasses import asdict

    from pipeline.engines.manifest import read_manifest
    from pipeline.platform import cpu_isa, find_gpu
    from pipeline.serving.arms import ENGINES

    gpu, _ = find_gpu()
    found: dict[str, Any] = {
        "arm": name,
        "settings": asdict(bench),
        "service": policy.plain()["service"],
        "device": {"gpu": gpu.name if gpu else None, "sm": gpu.sm if gpu else None, "cpu": cpu_isa()},
        "cores": os.cpu_count(),
        **{"backend": "unknown", "dtype": "unknown", "engine_digest": None, "limits": {}},
    }
    if arm == "baseline":
        found |= {"backend": "vllm", "dtype": params.baseline.dtype}
    elif "://" not in arm:
        manifest = read_manifest(ENGINES / arm)
        found |= {key: manifest[key] for key in ("backend", "dtype", "limits")} | {"engine_digest": manifest["digest"]}
    return found


def _server(arm: str, params: Params, gpu: bool) -> tuple[str, Callable[[], AbstractContextManager[Server]]]:
    """The arm's name and what serves it."""
    from functools import partial

    from pipeline.errors import UsageError
    from pipeline.serving.arms import ENGINES, serving
    from pipeline.serving.process import running

    if "://" in arm:
        return "server", partial(running, arm)
    if arm != "baseline" and not (ENGINES / arm / "manifest.json").is_file():
        known = sorted(path.parent.name for path in ENGINES.glob("*/manifest.json"))
        raise UsageError(f"{arm}: no such engine", f"name one of: {', '.join(['baseline', *known])}, or a URL")
    return arm, partial(serving, arm, params, gpu)


def _prompts(args: argparse.Namespace, bench: Bench, params: Params) -> Prompts:
    """The prompts: items of a file, or random ids."""
    import random

    from pipeline.bench.load import Prompts
    from pipeline.records import Item, read_items

    if args.prompt_tokens is None:
        return Prompts(read_items(args.items), bench.new_tokens, params.engine.max_tokens)
    order = random.Random(params.seed)
    items = [
        Item(f"random-{place}", "", "", tuple(order.choices(range(3, args.vocabulary), k=args.prompt_tokens)))
        for place in range(256)
    ]
    return Prompts(items, bench.new_tokens, args.prompt_tokens + bench.new_tokens)
