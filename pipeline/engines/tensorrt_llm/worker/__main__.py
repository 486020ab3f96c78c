"""The commands; see the package's docstring."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from . import MARK, REFUSED
from .convert import convert
from .library import build_engine, compare_config
from .probe import look, probe
from .tensors import Refused


def main() -> int:
    """Runs one command and prints its answer."""
    parser = argparse.ArgumentParser(prog="enginegate_worker", description="runs inside TensorRT-LLM's environment")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("look", help="versions, programs, GPUs")
    commands.add_parser("probe", help="look, and the names that this TensorRT-LLM knows (imports it)")
    for name, help_text in (("convert", "write a TensorRT-LLM checkpoint"), ("build", "build by the LLM API")):
        command = commands.add_parser(name, help=help_text)
        command.add_argument("job", type=Path, help="a JSON file with the arguments")
    arguments = parser.parse_args()
    try:
        answer = _run(arguments)
    except Refused as refused:
        print(MARK, json.dumps({"message": refused.message, "next_step": refused.next_step}), flush=True)
        return REFUSED
    print(MARK, json.dumps(answer), flush=True)
    return 0


def _run(arguments: argparse.Namespace) -> object:
    if arguments.command in ("look", "probe"):
        return look() if arguments.command == "look" else probe()
    job = json.loads(arguments.job.read_text(encoding="utf-8"))
    target, older = Path(job["target"]), Path(job["older"])
    if arguments.command == "build":
        build_engine(Path(job["model"]), older, target, job["options"])
        return {}
    config = json.loads((older / "config.json").read_text(encoding="utf-8"))
    sources = Path(job["export"]), Path(job["original"]), config
    done = convert(*sources, target, quantization=job["quantization"], dtype=job["dtype"], tp=job["tp"])
    compared = compare_config(target, older)
    if compared["wrong"]:
        key, (ours, theirs) = next(iter(compared["wrong"].items()))
        raise Refused(
            f"{key} is {ours!r} in the checkpoint and {theirs!r} as TensorRT-LLM reads the original one",
            "compare the two config.json files; report this with the architecture's name",
        )
    return done | {"library": {key: compared[key] for key in ("other", "not_compared")}}
