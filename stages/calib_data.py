"""Draws the calibration sample and the evaluation set into ``calib_data/``, with their card."""

from pathlib import Path

from pipeline.checkpoint.vocabulary import load_tokenizer
from pipeline.data import demo
from pipeline.data.card import data_card
from pipeline.data.promptlog import PromptLog
from pipeline.data.sampling import sample, write_calibration
from pipeline.data.sources import open_rows
from pipeline.files import digest_file, read_json, write_json
from pipeline.params import DEMO, load_params
from pipeline.records import write_items
from stages._main import stage

FOLDER = Path("calib_data")


def main() -> None:
    params = load_params()
    tokenizer = load_tokenizer(Path("artifacts/checkpoint"), trust_remote_code=params.model.trust_remote_code)
    calib = open_rows(params.data, "calib", answers=params.calib.answers)
    evaluation = open_rows(params.data, "eval")
    profile = PromptLog(params.data.profile_log, bad_lines=params.data.log_bad_lines) if params.data.profile_log else ()
    sampled = sample(params, calib, evaluation, tokenizer, profile)
    write_calibration(FOLDER / "calib.jsonl", sampled.calibration)
    write_items(FOLDER / "eval.jsonl", sampled.evaluation)
    card = data_card(
        params,
        read_json(Path("artifacts/data_source.json")),
        demo.LICENCE if params.data.source == DEMO else params.data.licence,
        sampled,
        digests={
            "calibration": digest_file(FOLDER / "calib.jsonl"),
            "evaluation": digest_file(FOLDER / "eval.jsonl"),
        },
        calib_log=calib if isinstance(calib, PromptLog) else None,
        complete={"calibration": calib.complete, "evaluation": evaluation.complete},
    )
    write_json(FOLDER / "card.json", card)
    print(f"{len(sampled.calibration)} calibration samples, {len(sampled.evaluation)} evaluation items, as asked")
    gaps = card["lengths"]["distance"]
    print(
        f"prompt lengths are {gaps['after']['wasserstein']:.2f} tokens from the profile's on average "
        f"({gaps['before']['wasserstein']:.2f} without length bands)"
    )
    if sampled.drawn.moved:
        print(f"warning: {sampled.drawn.moved} samples have other lengths than wanted: their bands ran out of rows")
    for name, whole in card["complete"].items():
        if not whole:
            print(f"warning: the {name} source has more rows than data.max_rows ({params.data.max_rows})")


if __name__ == "__main__":
    stage(main)
