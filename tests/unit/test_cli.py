"""The command line: help without heavy imports, errors as messages with their exit codes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.cli import COMMANDS, build_parser, guarded, main
from pipeline.errors import ConfigError, EnginegateError, ServerError

HEAVY = "torch transformers datasets modelopt onnx onnxruntime scipy matplotlib pandas dvc gto aiohttp"


def test_help_imports_nothing_heavy() -> None:
    """That is what keeps it under a second; a timing would only measure the machine."""
    code = (
        "import sys; from pipeline.cli import build_parser; build_parser().format_help(); "
        f"print([name for name in '{HEAVY}'.split() if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        build_parser().parse_args([command, "--help"])
    assert stopped.value.code == 0
    assert f"enginegate {command}" in capsys.readouterr().out.split("usage:", 1)[1].split("\n", 1)[1]


def test_a_wrong_command_line_is_64_because_2_is_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["no-such-command"])
    assert stopped.value.code == 64
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize(("error", "code"), [(ConfigError("a", "b"), 78), (ServerError("a"), 69)])
def test_known_errors_become_messages(error: EnginegateError, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise error

    assert guarded(fail) == code
    assert capsys.readouterr().err == f"error: {error}\n"


def test_ctrl_c_is_130_and_unknown_errors_are_not_swallowed(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    def broken() -> int:
        raise ZeroDivisionError

    assert guarded(interrupted) == 130
    assert "nothing was half-written" in capsys.readouterr().err
    with pytest.raises(ZeroDivisionError):
        guarded(broken)


def test_the_exit_code_table_is_complete() -> None:
    table = Path("docs/exit-codes.md").read_text()
    codes = {kind.exit_code for kind in [EnginegateError, *EnginegateError.__subclasses__(), ConfigError]}
    for code in {0, 1, 2, 3, 130} | codes:
        assert f"| {code} |" in table, code
