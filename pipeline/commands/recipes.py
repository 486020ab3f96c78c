"""``enginegate recipes``: every recipe, what it does and where it runs."""

from __future__ import annotations

import argparse
import json
from typing import Any

EPILOG = """\
A recipe is a file recipes/NAME.yaml; params.yaml names those that a run builds and judges (marked * here).

examples:
  enginegate recipes
  enginegate recipes --json | jq '.int8_mixed.exclude'
"""


def register(subparsers: Any) -> None:
    """Declares the command."""
    parser = subparsers.add_parser(
        "recipes",
        help="list the recipes",
        description="Lists every recipe of recipes/: how it quantises, what it leaves out, where it runs.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print them as one JSON object by name")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Reads and prints all recipes."""
    from dataclasses import asdict

    from pipeline.params import load_params
    from pipeline.quantize.recipes import load_recipe, recipe_names

    used = load_params().recipes
    recipes = {name: load_recipe(name) for name in recipe_names()}
    if args.json:
        plain = {name: asdict(recipe) | {"used": name in used} for name, recipe in recipes.items()}
        print(json.dumps(plain, indent=2, ensure_ascii=False))
        return 0
    for name, recipe in recipes.items():
        strength = f", alpha {recipe.alpha}" if recipe.algorithm == "smoothquant" else ""
        some = f", the first {recipe.samples} calibration samples" if recipe.samples else ""
        kinds = (
            f"{recipe.weights} weights, {_or_16(recipe.activations)} activations, {_or_16(recipe.kv_cache)} KV cache"
        )
        print(f"{'*' if name in used else ' '} {name}: {recipe.description}")
        print(f"    {kinds}; {recipe.algorithm}{strength}{some}")
        print(f"    quantised: {', '.join(recipe.include) or 'every linear layer'}")
        print(f"    left out: {', '.join(('*lm_head', *recipe.exclude))}")
        print(f"    runs on: {', '.join(recipe.backends) or 'no backend'}{_gpus(recipe.min_sm, recipe.max_sm)}")
    return 0


def _or_16(kind: str) -> str:
    return "16-bit" if kind == "none" else kind


def _gpus(least: int | None, most: int | None) -> str:
    if least and most:
        return f"; GPUs from SM {least} to SM {most}"
    return f"; GPUs from SM {least}" if least else f"; GPUs up to SM {most}" if most else ""
