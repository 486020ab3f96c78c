"""Stage ``decide``: one recipe's verdict. ``python -m stages.decide RECIPE``

Reads the evaluation set, the answers of all arms, their bench, the engine's manifest, the census, the policy and the
prices; writes ``artifacts/verdicts/RECIPE.json`` and succeeds whatever the verdict is, because DVC drops the outputs
of a stage that fails, and the evidence of a refusal is worth keeping. ``enforce`` and ``enginegate gate`` turn it into
an exit code.

The ledger of attempts, ``ledger/attempts.jsonl``, is on purpose no output of DVC. DVC deletes an output before
its stage runs and restores old ones on checkout, and both would forget attempts. It is a plain file to commit
with the run: git then shows when each attempt was made and makes it hard to lose one quietly. Running this
stage again for the same engine, evaluation set and policy adds no line, and a verdict that DVC restores from its
cache is one that was counted when it was made.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.bench.fleet import load_prices
from pipeline.bench.records import read_bench
from pipeline.errors import UsageError
from pipeline.files import read_json, read_jsonl, write_json, write_jsonl
from pipeline.gate.evidence import BASELINE, CANDIDATE, REPEAT, RUNTIME, Evidence
from pipeline.gate.ledger import with_attempt
from pipeline.gate.policy import load_policy
from pipeline.gate.verdict import decide
from pipeline.params import load_params
from pipeline.records import Score, read_arm, read_items, read_records, read_scores
from stages._main import stage

ANSWERS = Path("artifacts/answers")
VERDICTS = Path("artifacts/verdicts")
LEDGER = Path("ledger/attempts.jsonl")


def gather(recipe: str) -> Evidence:
    """Reads everything that the decision about ``recipe`` rests on."""
    arms, scores = {}, {}
    for role, name in ((BASELINE, BASELINE), (REPEAT, REPEAT), (RUNTIME, RUNTIME), (CANDIDATE, recipe)):
        if role != RUNTIME or (ANSWERS / name).exists():
            arms[role] = (read_arm(ANSWERS / name), read_records(ANSWERS / name))
            scores[role] = read_scores(ANSWERS / name)
    bench = {role: read_bench(Path(), name) for role, name in ((BASELINE, BASELINE), (CANDIDATE, recipe))}
    census = Path("artifacts/quantized") / recipe / "census.json"
    return Evidence(
        recipe=recipe,
        items=read_items(Path("calib_data/eval.jsonl")),
        arms=arms,
        manifest=read_json(Path("engines") / recipe / "manifest.json"),
        census=read_json(census) if census.exists() else {},
        card=read_json(Path("calib_data/card.json")),
        ledger=read_jsonl(LEDGER) if LEDGER.exists() else [],
        forced=_negative(scores) if all(scores.values()) else {},
        bench={role: found for role, found in bench.items() if found is not None},
        prices=load_prices().prices,
    )


def _negative(scores: Mapping[str, Sequence[Score]]) -> dict[str, dict[str, list[float]]]:
    """Negative log-likelihoods (nats) by role and item."""
    return {role: {one.id: [-value for value in one.log_probs] for one in rows} for role, rows in scores.items()}


def main() -> None:
    """Decides about the recipe on the command line."""
    if len(sys.argv) != 2 or sys.argv[1] not in load_params().recipes:
        raise UsageError("usage: python -m stages.decide RECIPE", "name one of the recipes of params.yaml")
    evidence = gather(sys.argv[1])
    verdict = decide(evidence, load_policy())
    write_json(VERDICTS / f"{evidence.recipe}.json", verdict.plain())
    write_jsonl(LEDGER, with_attempt(evidence.ledger, verdict.ledger[-1]))
    print(f"{evidence.recipe}: {verdict.verdict}")
    for reason in verdict.reasons:
        print(f"  {reason}")


if __name__ == "__main__":
    stage(main)
