"""Whether a command's help is there at once: without the heavy libraries, and with an example."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEAVY = ("numpy", "pydantic", "jinja2", "dvc", "gto", "torch", "jsonschema", "model_signing", "aiohttp")


def check_help(command: str) -> None:
    """Fails when ``enginegate COMMAND --help`` imports what it does not need, or shows no example."""
    code = (
        f"import sys; sys.argv = ['enginegate', '{command}', '--help']\n"
        "from pipeline.cli import main\n"
        "try: main()\n"
        f"finally: print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stderr.strip() == "[]"
    assert "example" in done.stdout
    assert f"enginegate {command}" in done.stdout
