"""Intake of the checkpoint: fetched or merged into ``artifacts/checkpoint``, checked, fingerprinted."""

from pathlib import Path

from pipeline.checkpoint.intake import inspect_checkpoint
from pipeline.checkpoint.materialize import materialize
from pipeline.files import read_json, write_json
from pipeline.params import load_params
from stages._main import stage

FOLDER = Path("artifacts/checkpoint")


def main() -> None:
    params = load_params()
    sources = read_json(Path("artifacts/model_source.json"))
    merged = materialize(params.model, sources, FOLDER)
    report = inspect_checkpoint(
        FOLDER,
        needs_template=params.prompt.template == "chat",
        trust_remote_code=params.model.trust_remote_code,
    )
    for warning in report["warnings"]:
        print(f"warning: {warning}")
    # Without file times: what hangs on this file must not run again because a file was touched.
    origin = {key: sources[key] for key in ("kind", "id", "commit", "path", "base") if key in sources}
    write_json(Path("artifacts/checkpoint.json"), report | {"source": origin | merged})


if __name__ == "__main__":
    stage(main)
