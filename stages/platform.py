"""Writes ``artifacts/platform.json``: the device that engines are compiled for, and the backends found.

Then asks the backend whether it can build each recipe here: refused now, not after the GPU time of a calibration.
"""

from pathlib import Path

from pipeline.engines import get_backend
from pipeline.files import write_json
from pipeline.params import load_params
from pipeline.platform import describe_platform
from pipeline.quantize.recipes import load_recipe
from stages._main import stage


def main() -> None:
    params = load_params()
    found = describe_platform(params.baseline, params.engine)
    write_json(Path("artifacts/platform.json"), found)
    device = found["device"]
    backends = [name for name, backend in found["backends"].items() if backend["available"]]
    print(f"{device['gpu'] or 'no GPU'}, {device['cpu']}; backends: {', '.join(backends) or 'none'}")
    backend = get_backend(params.engine.backend)
    for recipe in (None, *map(load_recipe, params.recipes)):
        backend.preflight(recipe, params.engine, found)


if __name__ == "__main__":
    stage(main)
