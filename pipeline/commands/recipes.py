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
        gpu = f", GPUs from SM {recipe.min_sm}" if recipe.min_sm else ""
        print(f"{'*' if name in used else ' '} {name}: {recipe.description}")
        print(f"    {recipe.weights} weights, {recipe.activations} activations, {recipe.algorithm}{strength}")
        print(f"    left out: {', '.join(('*lm_head', *recipe.exclude))}")
        print(f"    runs on: {', '.join(recipe.backends) or 'no backend of this release'}{gpu}")
    return 0
