"""``enginegate``: the command line. Each command is one module of ``pipeline/commands``.

Exit codes are listed in docs/exit-codes.md: 0 to 3 are verdicts, everything from 64 up is an error.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from pipeline import __version__
from pipeline.errors import EnginegateError, UsageError

COMMANDS = (
    *("bench", "diagnose", "diff", "doctor", "fit", "gate", "gc", "list", "lm-eval", "plan", "promote", "pull"),
    *("recipes", "rollback", "serve", "show", "verify"),
)


class _Parser(argparse.ArgumentParser):
    """Errors exit with 64, since 2 is the verdict INCONCLUSIVE."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(UsageError.exit_code, f"{self.prog}: {message}\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser with every command."""
    parser = _Parser(prog="enginegate", description="Calibrate, compile, compare, and promote only on evidence.")
    parser.add_argument("--version", action="version", version=f"enginegate {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for name in COMMANDS:
        importlib.import_module(f"pipeline.commands.{name.replace('-', '_')}").register(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    args = build_parser().parse_args(argv)
    return guarded(lambda: int(args.run(args)))


def guarded(action: Callable[[], int]) -> int:
    """Runs ``action``; a known error becomes its message and exit code, Ctrl-C becomes 130."""
    try:
        return action()
    except EnginegateError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted: nothing was half-written; run the same command to go on", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `enginegate show ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
