"""Draws the calibration sample and the evaluation set into ``calib_data/``, with their card."""

from pathlib import Path

from transformers import AutoTokenizer

from pipeline.data import demo
from pipeline.data.card import data_card
from pipeline.data.sampling import sample, write_calibration
from pipeline.data.sources import load_rows
from pipeline.files import read_json, write_json
from pipeline.params import DEMO, load_params
from pipeline.records import write_items
from stages._main import stage

FOLDER = Path("calib_data")


def main() -> None:
    params = load_params()
    tokenizer = AutoTokenizer.from_pretrained(
        "artifacts/checkpoint", trust_remote_code=params.model.trust_remote_code, local_files_only=True
    )
    sampled = sample(params, load_rows(params.data, "calib"), load_rows(params.data, "eval"), tokenizer)
    source = read_json(Path("artifacts/sources.json"))["data"]
    licence = demo.LICENCE if params.data.source == DEMO else params.data.licence
    card = data_card(params.data, source, licence, sampled)
    write_calibration(FOLDER / "calib.jsonl", sampled.calibration)
    write_items(FOLDER / "eval.jsonl", sampled.evaluation)
    write_json(FOLDER / "card.json", card)
    counts = card["counts"]
    print(
        f"{counts['calib_used']} of {counts['calib_asked']} calibration samples, "
        f"{counts['eval_used']} of {counts['eval_asked']} evaluation items"
    )
    if counts["calib_used"] < counts["calib_asked"]:
        print("warning: fewer calibration samples than asked; the report says so")


if __name__ == "__main__":
    stage(main)
