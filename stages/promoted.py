"""Copies each engine whose verdict is PROMOTE to ``engines/promoted/RECIPE/``, its verdict in the manifest.

The output persists: a recipe that is refused leaves the engine that was promoted before it in place.
"""

from pathlib import Path

from pipeline.config import load_yaml
from pipeline.params import load_params
from pipeline.registry.promoted import PROMOTED, promote_engine, promoted_recipes, recover, verify_promoted
from stages._main import stage

VERDICTS = Path("artifacts/verdicts")
LOCK = Path("dvc.lock")


def main() -> None:
    _warn_about_absent()
    recover()
    recipes = load_params().recipes
    for recipe in set(promoted_recipes()) - set(recipes):
        verify_promoted(PROMOTED / recipe)  # of an earlier params.yaml; DVC must not commit it damaged
    for recipe in recipes:
        kept = promote_engine(recipe, VERDICTS / f"{recipe}.json", Path("engines") / recipe)
        print(f"{kept.recipe}: {kept.word} ({kept.note})")


def _warn_about_absent() -> None:
    """In a clone without data, engines promoted earlier are in ``dvc.lock`` but not here."""
    if PROMOTED.exists() or not LOCK.exists():
        return
    outs = load_yaml(LOCK).get("stages", {}).get("promoted", {}).get("outs", [])
    if any(out["path"] == PROMOTED.as_posix() and out.get("nfiles") for out in outs):
        print(
            f"warning: dvc.lock names engines promoted earlier that are not on this machine; "
            f"`git checkout dvc.lock && dvc pull {PROMOTED}` before `dvc repro` keeps them"
        )


if __name__ == "__main__":
    stage(main)
