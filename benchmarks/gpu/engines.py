"""Builds engines from the graphs of ``benchmarks.gpu.graphs`` with the pipeline's own builder.

    python -m benchmarks.gpu.engines build GRAPH_DIR ENGINE_DIR --batches 1 8 32 [--level 2] [--cache FILE]
    python -m benchmarks.gpu.engines seal ENGINE_DIR [--tokenizer CHECKPOINT]

``build`` needs the TensorRT bindings, NumPy and cuda-python, and runs on Python 3.10, the newest that TensorRT 8.6 has
bindings for. ``seal`` writes the manifest, without which no engine is loaded; it takes the project's own Python. With
a tokenizer the folder can be served (``enginegate serve``).
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from pipeline.engines.manifest import write_manifest
from pipeline.engines.tensorrt.builder import Settings, build_plan
from pipeline.engines.tensorrt.device import Device
from pipeline.engines.tensorrt.library import load_library
from pipeline.engines.tensorrt.plan import read_description

WORKSPACE_GIB = 8
# TensorRT 8.6 can take kernels of cuBLAS and cuDNN, newer ones take none; nor does this benchmark unless told to.
TACTICS = {8: ("EDGE_MASK_CONVOLUTIONS", "JIT_CONVOLUTIONS")}

CUBLAS = ("CUBLAS", "CUBLAS_LT")
TOKENIZER = ("tokenizer", "special_tokens", "chat_template")  # how the names of its files begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    made = commands.add_parser("build")
    made.set_defaults(run=build)
    made.add_argument("graph", type=Path)
    made.add_argument("engine", type=Path)
    made.add_argument("--batches", type=int, nargs="+", default=[1])
    made.add_argument("--level", type=int, default=2, help="builder optimisation level")
    made.add_argument("--cache", type=Path, help="timing cache, read and written")
    made.add_argument("--cublas", action="store_true", help="kernels of cuBLAS too; it must be on the library path")
    made.add_argument("--steps-only", action="store_true", help="no profile for prompts: quicker to build")
    sealed = commands.add_parser("seal")
    sealed.set_defaults(run=seal)
    sealed.add_argument("engine", type=Path)
    sealed.add_argument("--tokenizer", type=Path, help="a folder whose tokenizer the engine is served with")
    args = parser.parse_args()
    args.run(args)


def build(args: argparse.Namespace) -> None:
    """Writes ``model.plan`` and ``engine.json``."""
    library = load_library("tensorrt")
    cache = json.loads((args.graph / "cache.json").read_text())
    args.engine.mkdir(parents=True, exist_ok=True)
    tactics = TACTICS.get(library.numbers[0])
    if args.cublas:
        tactics = (*(tactics or ()), *CUBLAS)
    settings = Settings(
        max_batch=max(args.batches),
        max_tokens=int((args.graph / "capacity.json").read_text()),
        sm=(Device().sm,),
        buckets=tuple(args.batches),
        optimization_level=args.level,
        workspace_gib=WORKSPACE_GIB,
        timing_cache=args.cache,
        log=args.engine.with_suffix(".log"),
        tactics=tactics,
        progress=False,
        steps_only=args.steps_only,
    )
    built = build_plan(library, args.graph / "model.onnx", args.engine, cache, settings)
    built.description.write(args.engine)
    print(json.dumps({"engine": args.engine.name, "library": library.label, **built.record}), flush=True)


def seal(args: argparse.Namespace) -> None:
    """Writes ``manifest.json``."""
    if args.tokenizer:
        (args.engine / "tokenizer").mkdir(exist_ok=True)
        for path in args.tokenizer.iterdir():
            if path.name.startswith(TOKENIZER):
                shutil.copy(path, args.engine / "tokenizer" / path.name)
    description = read_description(args.engine)
    told = {"name": args.engine.name, "recipe": None, "backend": "tensorrt", "dtype": "see the graph's name"}
    limits = description.limits | {"threads": 1}
    rest = {"limits": limits, "sources": {}, "platform": {"sm": description.sm[0]}, "build": {}}
    write_manifest(args.engine, told | rest)


if __name__ == "__main__":
    main()
