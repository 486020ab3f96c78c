"""Shared entry of the stages: a known error becomes its message and exit code, never a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable

from pipeline.cli import guarded


def stage(action: Callable[[], None]) -> None:
    """Runs a stage's ``main`` and exits."""

    def run() -> int:
        action()
        return 0

    sys.exit(guarded(run))
