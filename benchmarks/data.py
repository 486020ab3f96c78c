"""Drawing the calibration set from a large source, and finding leakage.

``python -m benchmarks.data --tokenizer artifacts/checkpoint [--rows 30000 300000] [--samples 10000] [--texts 10000]``

Two comparisons. *Stream*: ``samples`` are drawn from JSON lines of each number of ``rows``, length bands, deduplication
and the leakage check against 1 000 evaluation items included, each in a process of its own; compared is the peak
memory, which must not grow with the number of rows (promised: under 1.25 times for 10 times the rows). *Leakage*: all
pairs of ``texts`` x ``texts`` by the product of sparse matrices, against datasketch's MinHashLSH with exact
confirmation; one text in a hundred has a reworded twin on the other side, and both must find it. The last line is one
JSON object. Exit code 1 when memory grows, a twin is missed by ours, or ours is slower than MinHash.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from bisect import bisect
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from datasketch import MinHash, MinHashLSH

from pipeline.checkpoint.vocabulary import load_tokenizer
from pipeline.data.leakage import CONTAINED, JACCARD, LEAST, NGRAM, Leakage, normalized
from pipeline.data.sampling import sample, write_calibration
from pipeline.data.sources import open_rows
from pipeline.params import Columns, Data, Params

VOCABULARY = 30_000
SWAP = 0.05  # of a twin's words are others


class Language:
    """Texts of words with Zipf's frequencies, as long as chat prompts are (log-normal, median 40 words)."""

    def __init__(self, seed: int) -> None:
        self.order = random.Random(seed)
        heads = [f"{one}{two}" for one in "bdfgklmnprst" for two in "aeiou"]
        self.words = [f"{heads[n % 60]}{heads[n // 60 % 60]}{heads[n // 3600 % 60]}" for n in range(VOCABULARY)]
        self.cumulative = list(accumulate(1 / (place + 3) for place in range(VOCABULARY)))

    def word(self) -> str:
        return self.words[bisect(self.cumulative, self.order.random() * self.cumulative[-1])]

    def text(self) -> str:
        length = min(400, max(4, round(self.order.lognormvariate(3.7, 0.8))))
        return " ".join(self.word() for _ in range(length))

    def twin(self, text: str) -> str:
        return " ".join(self.word() if self.order.random() < SWAP else word for word in text.split())


def write_rows(path: Path, count: int, seed: int) -> None:
    """Pairs as JSON lines; one row in 50 stands twice."""
    language = Language(seed)
    with path.open("w") as file:
        text = ""
        for place in range(count):
            text = text if place % 50 == 1 else language.text()
            file.write(json.dumps({"id": f"{seed}-{place}", "source": text, "target": text[:80]}) + "\n")


def draw(folder: Path, tokenizer: Path, samples: int) -> dict[str, Any]:
    """One draw in this process: seconds and peak memory, over what importing and the tokenizer take."""
    data = Data(source="json", calib_file=f"{folder}/calib.jsonl", eval_file=f"{folder}/eval.jsonl")
    params = Params(data=replace(data, columns=Columns(group=None)))
    params = replace(params, calib=replace(params.calib, samples=samples))
    words = load_tokenizer(tokenizer)
    before = _peak()
    start = time.perf_counter()
    sampled = sample(params, open_rows(params.data, "calib"), open_rows(params.data, "eval"), words)
    write_calibration(folder / "out.jsonl", sampled.calibration)
    return {
        "seconds": round(time.perf_counter() - start, 1),
        "peak_mib": round(_peak(), 1),
        "added_mib": round(_peak() - before, 1),
        "counts": sampled.counts,
        "distances": sampled.distances(),
    }


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def stream(rows: list[int], samples: int, tokenizer: Path) -> dict[str, Any]:
    """The draw from sources of several sizes."""
    found: dict[str, Any] = {}
    for count in rows:
        with tempfile.TemporaryDirectory() as folder:
            write_rows(Path(folder) / "calib.jsonl", count, seed=1)
            write_rows(Path(folder) / "eval.jsonl", 1500, seed=2)
            command = [sys.executable, "-m", "benchmarks.data", "--one", folder, "--tokenizer", str(tokenizer)]
            done = subprocess.run([*command, "--samples", str(samples)], stdout=subprocess.PIPE, text=True, check=True)
            found[str(count)] = json.loads(done.stdout.splitlines()[-1])
        print(count, "rows:", {key: found[str(count)][key] for key in ("seconds", "peak_mib", "added_mib")}, flush=True)
    return found


def by_minhash(items: dict[str, str], samples: dict[str, str]) -> dict[str, str]:
    """The same question to datasketch: candidates from MinHashLSH, confirmed exactly."""

    def grams(text: str) -> set[str]:
        words = normalized(text).split()
        return {" ".join(words[place : place + NGRAM]) for place in range(len(words) - NGRAM + 1)}

    def hashed(texts: dict[str, str]) -> list[Any]:
        return MinHash.bulk([[gram.encode() for gram in grams(text)] for text in texts.values()], num_perm=128)

    index = MinHashLSH(threshold=JACCARD, num_perm=128)
    for name, one in zip(items, hashed(items), strict=True):
        index.insert(name, one)
    found: dict[str, str] = {}
    for name, one in zip(samples, hashed(samples), strict=True):
        own = grams(samples[name])
        for item in index.query(one):
            other = grams(items[item])
            shared, shorter = len(own & other), min(len(own), len(other))
            if shared >= JACCARD * len(own | other) or (shorter >= LEAST and shared >= CONTAINED * shorter):
                found.setdefault(item, name)
    return found


def leakage(count: int) -> dict[str, Any]:
    """All pairs of ``count`` x ``count`` texts, ours and MinHash."""
    language = Language(3)
    items = {f"e{place}": language.text() for place in range(count)}
    samples = {f"c{place}": language.text() for place in range(count)}
    twins = {f"e{place}": f"c{place}" for place in range(0, count, 100)}
    for item, twin in twins.items():
        samples[twin] = language.twin(items[item])
    start = time.perf_counter()
    ours = Leakage({name: [text] for name, text in items.items()}).overlaps(
        {name: [text] for name, text in samples.items()}
    )
    middle = time.perf_counter()
    theirs = by_minhash(items, samples)
    end = time.perf_counter()
    return {
        "seconds": round(middle - start, 2),
        "minhash_seconds": round(end - middle, 2),
        "minhash_over_ours": round((end - middle) / (middle - start), 1),
        "pairs": len(ours),
        "minhash_missed": len(ours.keys() - theirs.keys()),
        "only_minhash": len(theirs.keys() - ours.keys()),
        "twins": len(twins),
        "twins_ours": sum(ours.get(item) == twin for item, twin in twins.items()),
        "twins_minhash": sum(theirs.get(item) == twin for item, twin in twins.items()),
    }


def main() -> int:
    """Runs both; prints the figures as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, default=Path("artifacts/checkpoint"), help="a checkpoint folder")
    parser.add_argument("--rows", type=int, nargs="+", default=[30_000, 300_000])
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--texts", type=int, default=10_000)
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(draw(args.one, args.tokenizer, args.samples)))
        return 0
    found = {"leakage": leakage(args.texts), "stream": stream(args.rows, args.samples, args.tokenizer)}
    peaks = [row["peak_mib"] for row in found["stream"].values()]
    growth = round(peaks[-1] / peaks[0], 3)
    kept = growth < 1.25 and found["leakage"]["minhash_over_ours"] > 1 and found["leakage"]["only_minhash"] == 0
    print(json.dumps({"benchmark": "data", "kept": kept, "memory_growth": growth, **found}))
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
