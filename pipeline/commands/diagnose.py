"""``enginegate diagnose``: where the time goes in each arm, and why."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

EPILOG = """\
Reads artifacts/bench (the stage `bench`, or `enginegate bench --output`); writes one page an arm.

examples:
  enginegate diagnose                      # every benched arm, into diagnosis/
  enginegate diagnose int8_mixed --json | jq .causes
  enginegate diagnose int8_mixed --layers  # and the time of every layer of a TensorRT engine, on its GPU
"""


def register(subparsers: Any) -> None:
    """Declares the command."""
    parser = subparsers.add_parser(
        "diagnose",
        help="where the time goes in each benched arm",
        description="Writes one page an arm: shares of a request's time, slowest requests, likely causes.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("arms", nargs="*", metavar="ARM", help="default: all that were benched")
    parser.add_argument("--bench", type=Path, default=Path("artifacts/bench"), metavar="FOLDER")
    parser.add_argument("--output", type=Path, default=Path("diagnosis"), metavar="FOLDER", help="default: diagnosis")
    parser.add_argument("--layers", action="store_true", help="measure each layer (TensorRT engines, on their GPU)")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON instead; writes no page")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Reads the bench of each arm, prints its diagnosis, writes its page."""
    import json

    from pipeline.bench.diagnose import diagnose
    from pipeline.bench.records import FILE
    from pipeline.errors import UsageError
    from pipeline.files import read_json
    from pipeline.report.diagnosis import lines, write_page

    there = sorted(path.parent.name for path in args.bench.glob(f"*/{FILE}"))
    unknown = [name for name in args.arms if name not in there]
    if unknown or not there:
        raise UsageError(
            f"{', '.join(unknown) or 'no arm'}: not benched in {args.bench}",
            f"name one of: {', '.join(there)}" if there else "set bench.kinds in params.yaml and run `dvc repro bench`",
        )
    found = []
    for name in args.arms or there:
        diagnosis = diagnose(read_json(args.bench / name / FILE), _layers(name) if args.layers else ())
        found.append(diagnosis)
        if not args.json:
            print("\n".join(lines(diagnosis)))
            print(f"  page: {write_page(diagnosis, args.output, _traces(name))}")
    if args.json:
        plain = [one.plain() for one in found]
        print(json.dumps(plain[0] if len(plain) == 1 else plain, indent=2))
    return 0


def _layers(name: str) -> list[dict[str, Any]]:
    """The time of each layer of a TensorRT engine; the baseline has none. Raises UsageError for other engines."""
    from pipeline.engines.manifest import read_manifest
    from pipeline.errors import UsageError
    from pipeline.serving.arms import ENGINES

    if name == "baseline":
        return []
    if read_manifest(ENGINES / name)["backend"] != "tensorrt":
        raise UsageError(f"{name}: no engine of TensorRT", "--layers is for those: name them")
    from pipeline.engines.tensorrt.inspect import layer_rows

    rows = layer_rows(ENGINES / name)
    return [{"name": row.name, "precision": row.precision, "ms": row.milliseconds} for row in rows]


def _traces(name: str) -> list[str]:
    """Where vLLM's own profiler or traces go, when params.yaml turned them on."""
    from pipeline.params import PARAMS_FILE, load_params

    if name != "baseline" or not PARAMS_FILE.exists():
        return []
    baseline = load_params().baseline
    words = [part for word in baseline.extra_args for part in word.split("=", 1)]
    told = []
    if folder := baseline.env.get("VLLM_TORCH_PROFILER_DIR"):
        told.append(f"vLLM's torch profiler writes to {folder}: open a trace in Perfetto.")
    for flag, what in (("--otlp-traces-endpoint", "OpenTelemetry traces go to"), ("--profiler-config", "profiler:")):
        if flag in words[:-1]:
            told.append(f"vLLM's {what} {words[words.index(flag) + 1]}")
    return told
