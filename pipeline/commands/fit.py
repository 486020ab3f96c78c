"""``enginegate fit``: whether model, KV cache and batch fit a GPU, before anything is run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.fit import Asked, Fit, Gpu, Setting
    from pipeline.params import Params

EPILOG = """\
CHECKPOINT is a folder with config.json; weights are read from the headers of its safetensors, or, without any, from
the shapes that the config gives. Nothing is loaded and no GPU is needed.

exit code: 0 when every row fits; 1 when one does not; 65 when the checkpoint cannot be read.

examples:
  enginegate fit llama-2-13b --gpu rtx4090                  (13B on 24 GB: in 8 bit)
  enginegate fit llama-2-13b --gpu rtx4090 --gpus 2         (sharded over two)
  enginegate fit artifacts/checkpoint --memory-gib 40 --sm 80 --tokens 4096 --sequences 8 --json
"""


def register(subparsers: Any) -> None:
    """Declares the command."""
    parser = subparsers.add_parser(
        "fit",
        help="whether model, KV cache and batch fit a GPU",
        description="Says for each recipe whether weights, KV cache and batch fit a GPU, and how many requests do.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", nargs="?", type=Path, help="default: artifacts/checkpoint")
    parser.add_argument("--gpu", metavar="NAME", help="a known GPU; `--gpu list` names them")
    parser.add_argument("--memory-gib", type=float, help="or: its memory, as nvidia-smi shows it")
    parser.add_argument("--sm", type=int, help="its compute capability, 89 for 8.9")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs that share the model, tensor-parallel (default 1)")
    parser.add_argument("--tokens", type=int, help="of a request, prompt and answer (default: engine.max_tokens)")
    parser.add_argument("--sequences", type=int, help="requests at a time (default: engine.max_batch)")
    parser.add_argument("--recipe", nargs="+", metavar="NAME", help="default: fp16 and all recipes")
    parser.add_argument("--utilisation", type=float, default=0.9, help="share of the memory to use (default 0.9)")
    parser.add_argument("--batch-tokens", type=int, default=8192, help="tokens of a prefill step (default 8192)")
    parser.add_argument("--json", action="store_true", help="print one JSON object, in bytes")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Reads shapes and config, prints a row for each recipe."""
    from pipeline.checkpoint.shapes import read_config, read_shapes
    from pipeline.errors import UsageError
    from pipeline.fit import GPUS, Architecture, Assumptions, Setting, fit
    from pipeline.params import PARAMS_FILE, Params, load_params
    from pipeline.quantize.recipes import load_recipe, recipe_names

    if args.gpu == "list":
        for known in GPUS.values():
            print(f"{known.name:<10} {known.memory / 2**30:6.1f} GiB  SM {known.sm}")
        return 0
    params = load_params() if PARAMS_FILE.exists() else Params()
    folder = args.checkpoint or Path("artifacts/checkpoint")
    if not 0 < args.utilisation <= 1:
        raise UsageError("--utilisation: more than 0 and at most 1", "vLLM's own default is 0.9")
    given = Assumptions(batch_tokens=args.batch_tokens, utilisation=args.utilisation)
    setting = Setting(_gpu(args), _asked(args, params), given)
    model, shapes = Architecture.of(read_config(folder)), read_shapes(folder)
    names = args.recipe or ["fp16", *recipe_names()]
    recipes = {name: None if name == "fp16" else load_recipe(name) for name in names}
    found = [fit(name, recipe, shapes, model, setting) for name, recipe in recipes.items()]
    if args.json:
        print(json.dumps(_plain(folder, shapes, setting, found), indent=2))
    else:
        print("\n".join(_lines(folder, shapes, setting, found)))
    return 0 if all(one.fits for one in found) else 1


def _gpu(args: argparse.Namespace) -> Gpu:
    from pipeline.errors import UsageError
    from pipeline.fit import GIB, GPUS, Gpu

    if (args.gpu is None) == (args.memory_gib is None):
        raise UsageError("give --gpu NAME or --memory-gib", f"known are: {', '.join(GPUS)}")
    if args.gpu is None:
        if args.memory_gib <= 0:
            raise UsageError("--memory-gib: must be more than 0", "24 for an RTX 4090")
        return Gpu(f"{args.memory_gib:g} GiB", int(args.memory_gib * GIB), args.sm)
    name = args.gpu.lower().replace(" ", "")
    if name not in GPUS:
        raise UsageError(f"no GPU named {args.gpu!r}", f"known are: {', '.join(GPUS)}; or give --memory-gib and --sm")
    return GPUS[name]


def _asked(args: argparse.Namespace, params: Params) -> Asked:
    from pipeline.errors import UsageError
    from pipeline.fit import Asked

    asked = Asked(
        tokens=params.engine.max_tokens if args.tokens is None else args.tokens,
        sequences=params.engine.max_batch if args.sequences is None else args.sequences,
        gpus=args.gpus,
    )
    if min(asked.tokens, asked.sequences, asked.gpus, args.batch_tokens) < 1:
        raise UsageError("--tokens, --sequences, --gpus, --batch-tokens: must be at least 1", "see the examples")
    return asked


def _plain(folder: Path, shapes: Any, setting: Setting, found: list[Fit]) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "checkpoint": str(folder),
        "parameters": _parameters(shapes),
        **asdict(setting),
        "recipes": {one.recipe: asdict(one) | {"fits": one.fits} for one in found},
    }


def _parameters(shapes: Any) -> int:
    from math import prod

    return sum(prod(shape) for shape in shapes.values())


def _lines(folder: Path, shapes: Any, setting: Setting, found: list[Fit]) -> list[str]:
    from pipeline.fit import GIB

    gpu, asked, given = setting.gpu, setting.asked, setting.given
    sm = f", SM {gpu.sm}" if gpu.sm else ""
    shared = f"{asked.gpus} times " if asked.gpus > 1 else ""
    each = " on each GPU" if asked.gpus > 1 else ""
    head = f"{'recipe':<14}{'weights':>10}{'overhead':>10}{'for KV':>10}{'KiB/token':>11}{'tokens':>10}{'requests':>10}"
    lines = [
        f"{folder}: {_parameters(shapes) / 1e9:.2f}e9 parameters on {shared}{gpu.name} "
        f"({gpu.memory / GIB:.1f} GiB{sm}); asked: {asked.sequences} requests of {asked.tokens} tokens",
        "",
        f"{head}  fits",
    ]
    for one in found:
        cells = [one.weights / GIB, (one.activations + one.runtime) / GIB, max(0, one.left) / GIB]
        lines.append(
            f"{one.recipe:<14}{''.join(f'{cell:>10.2f}' for cell in cells)}{one.kv_per_token / 1024:>11.1f}"
            f"{one.kv_tokens:>10}{one.sequences:>10}  {'yes' if one.fits else f'no: {one.why_not}'}"
        )
    nccl = f", {given.communication / GIB:g} GiB for NCCL" if asked.gpus > 1 else ""
    return [
        *lines,
        "",
        f"GiB{each}. Assumed: {given.utilisation:.0%} of the memory is used; overhead is {given.runtime / GIB:g} GiB",
        f"of runtime (CUDA context, kernels, graphs){nccl} and the activations of {given.batch_tokens} prefill tokens.",
    ]
