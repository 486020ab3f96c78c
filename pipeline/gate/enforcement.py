"""What a set of verdicts means for a run: ``policy.require`` against the verdicts, as an exit code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pipeline.gate.verdict import EXIT_CODES

Require = Literal["any", "all"] | tuple[str, ...]
PROMOTED = EXIT_CODES["PROMOTE"]


def exit_code(verdicts: Mapping[str, str], require: Require) -> int:
    """0 when the requirement is met, else the gravest code among the recipes that miss it.

    ``verdicts`` maps recipe to verdict. A required recipe without a verdict counts as INVALID.
    """
    codes = {recipe: EXIT_CODES[word] for recipe, word in verdicts.items()}
    if require == "any":
        return PROMOTED if PROMOTED in codes.values() else max(codes.values(), default=EXIT_CODES["INVALID"])
    names = codes if require == "all" else require
    return max((codes.get(name, EXIT_CODES["INVALID"]) for name in names), default=EXIT_CODES["INVALID"])
