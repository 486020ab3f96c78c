"""What the run starts from: model and data, fingerprinted. Always runs, so that a new fine-tune is noticed."""

from pathlib import Path

from pipeline.files import write_json
from pipeline.params import load_params
from pipeline.sources import resolve_sources
from stages._main import stage


def main() -> None:
    # A file each, so that new data does not read a checkpoint of 140 GB again.
    for name, found in resolve_sources(load_params()).items():
        write_json(Path(f"artifacts/{name}_source.json"), found)


if __name__ == "__main__":
    stage(main)
