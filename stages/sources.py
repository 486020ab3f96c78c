"""What the run starts from: model and data, fingerprinted. Always runs, so that a new fine-tune is noticed."""

from pathlib import Path

from pipeline.files import write_json
from pipeline.params import load_params
from pipeline.sources import resolve_sources
from stages._main import stage


def main() -> None:
    write_json(Path("artifacts/sources.json"), resolve_sources(load_params()))


if __name__ == "__main__":
    stage(main)
