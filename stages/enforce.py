"""Stage ``enforce``: the last one; fails the run unless the policy's ``require`` is met. ``python -m stages.enforce``

It comes after ``report``, so the page is written whatever the verdicts are, and it always runs.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pipeline.cli import guarded
from pipeline.files import read_json
from pipeline.gate.enforcement import exit_code
from pipeline.gate.policy import load_policy
from pipeline.params import load_params


def main() -> int:
    """Prints one line a recipe; returns 0 or the gate's code."""
    policy = load_policy()
    verdicts = {}
    for recipe in load_params().recipes:
        verdict = read_json(Path("artifacts/verdicts") / f"{recipe}.json")
        verdicts[recipe] = verdict["verdict"]
        print(f"{recipe}: {verdict['verdict']}: {verdict['reasons'][0]}")
    code = exit_code(verdicts, policy.require)
    wanted = policy.require if isinstance(policy.require, str) else ", ".join(policy.require)
    print(f"required to be promoted: {wanted}: {'met' if code == 0 else 'not met'}")
    return code


if __name__ == "__main__":
    sys.exit(guarded(main))
