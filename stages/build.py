"""Compiles one engine: ``python -m stages.build NAME``, where NAME is a recipe or ``runtime``.

``runtime`` is the engine without quantisation: what it loses, the runtime loses, not the recipe.
A recipe's engine also leaves its digest in ``artifacts/built/``, for the stage that hangs on all engines (``bench``).
"""

import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.engines import BuildInputs, ExecutorBackend, get_backend, load_executor
from pipeline.engines.check import check_engine
from pipeline.engines.manifest import write_manifest
from pipeline.files import atomic_folder, digest_json, read_json, write_json
from pipeline.params import load_params
from pipeline.quantize.probe import Probe
from pipeline.quantize.recipes import Recipe, load_recipe
from stages._main import stage

PLAIN = Path("artifacts/onnx")
CHECKPOINT = Path("artifacts/checkpoint")
BUILT = Path("artifacts/built")


def main() -> None:
    name = sys.argv[1]
    params = load_params()
    recipe = None if name == "runtime" else load_recipe(name)
    quantized = Path("artifacts/quantized") / name
    backend = get_backend(params.engine.backend)
    platform = read_json(Path("artifacts/platform.json"))
    backend.preflight(recipe, params.engine, platform)
    intake = read_json(Path("artifacts/checkpoint.json"))
    sources: dict[str, Any] = {"checkpoint": intake["fingerprints"], "source": intake["source"]}
    calibration: dict[str, Any] = {}
    if recipe is not None:
        sources["calibration"] = read_json(Path("calib_data/card.json"))["digests"]["calibration"]
        sources["recipe"] = digest_json(asdict(recipe))
        calibration = {"recipe": asdict(recipe), "samples": read_json(quantized / "census.json")["samples"]}
    print(f"building {name} for {params.engine.backend}", flush=True)
    with atomic_folder(Path("engines") / name) as part:
        inputs = BuildInputs(
            CHECKPOINT,
            PLAIN,
            None if recipe is None else quantized,
            recipe,
            params.engine,
            platform,
            log=Path("logs") / f"build-{name}.log",
        )
        build = backend.compile_engine(inputs, part)
        if not (part / "tokenizer").exists():  # a backend that needs it in another form has written it
            _copy_tokenizer(part / "tokenizer")
        description = {
            "name": name,
            "recipe": None if recipe is None else name,
            "backend": params.engine.backend,
            "dtype": build.pop("dtype", None) or _dtype(recipe, backend.plain_dtype(params.engine)),
            "limits": {
                "max_batch": params.engine.max_batch,
                "max_tokens": params.engine.max_tokens,
                "threads": params.engine.threads,
            },
            "sources": sources,
            "calibration": calibration,
            "platform": platform["device"] | build.pop("platform", {}),
            "build": build,
        }
        if "validity" in build:  # a backend that knows better than `validity_of` where its engine may be loaded
            description["validity"] = build.pop("validity")
        manifest = write_manifest(part, description)
        checked = "its own server answers for it, so its logits were not compared"
        if "unchecked" in build:
            checked = f"its logits were not compared: {build['unchecked']}"
        elif isinstance(backend, ExecutorBackend):
            probe = Probe.load((PLAIN if recipe is None else quantized) / "probe.npz")
            kind = "none" if recipe is None else recipe.weights
            rest = "float16" if "float16" in description["dtype"] else "float32"
            found = check_engine(load_executor(part), probe, kind, rest)
            description["build"] = build | {"probe": asdict(found) | {"noise_kl": probe.noise}}
            manifest = write_manifest(part, description)
            checked = f"mean KL to the calibrated model {found.mean_kl:.5f} (its own noise {probe.noise:.5f})"
    if recipe is not None:
        write_json(BUILT / f"{name}.json", {"digest": manifest["digest"]})
    print(f"{name}: {manifest['digest'][:19]}, {build['summary']}, {checked}")


def _dtype(recipe: Recipe | None, plain: str | None) -> str:
    if recipe is None:
        return plain or "float16"
    return f"{recipe.weights} (rest {plain})" if plain else recipe.weights


def _copy_tokenizer(target: Path) -> None:
    """The tokenizer travels with the engine: everything of the checkpoint but weights."""
    target.mkdir()
    for path in sorted(CHECKPOINT.iterdir()):
        if path.suffix in {".json", ".jinja", ".model", ".txt"} and not path.name.endswith(".index.json"):
            shutil.copy(path, target / path.name)


if __name__ == "__main__":
    stage(main)
