"""Writes ``artifacts/platform.json``: the device that engines are compiled for, and the backends found."""

from pathlib import Path

from pipeline.files import write_json
from pipeline.params import load_params
from pipeline.platform import describe_platform
from stages._main import stage


def main() -> None:
    found = describe_platform(load_params().baseline)
    write_json(Path("artifacts/platform.json"), found)
    device = found["device"]
    backends = [name for name, backend in found["backends"].items() if backend["available"]]
    print(f"{device['gpu'] or 'no GPU'}, {device['cpu']}; backends: {', '.join(backends) or 'none'}")


if __name__ == "__main__":
    stage(main)
