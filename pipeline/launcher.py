"""The prefix of ``params.launcher``, which takes a command to a GPU: ``srun``, ``sky exec``, ``docker run``."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence

from pipeline.params import Params

LAUNCHED = "ENGINEGATE_LAUNCHED"  # set for what a launcher started, so that it is not launched again


def launched(
    argv: Sequence[str], params: Params, env: Mapping[str, str] | None = None, gpus: str = "all"
) -> tuple[str, ...]:
    """The command line ``argv`` behind the launcher; without one, ``argv`` itself.

    ``{gpus}`` in the launcher becomes ``gpus``. ``env`` goes through ``env NAME=VALUE``, since not every launcher
    hands our environment on (``docker run`` does not); without a launcher the caller gives it to the process as usual.
    """
    prefix = [word.replace("{gpus}", gpus) for word in shlex.split(params.launcher)]
    if not prefix:
        return tuple(argv)
    variables = ["env", *(f"{name}={value}" for name, value in sorted(env.items()))] if env else []
    return (*prefix, *variables, *argv)


def relaunched(module: str, *arguments: str, params: Params) -> bool:
    """Runs ``python -m MODULE ARGUMENTS`` behind the launcher, to its end; True when it did.

    False without a launcher, and when we are what it started: then the work is ours. A command that fails has printed
    its own error; its exit code becomes ours.
    """
    if not params.launcher or LAUNCHED in os.environ:
        return False
    command = launched([sys.executable, "-m", module, *arguments], params, {LAUNCHED: "1"})
    code = subprocess.run(command, check=False).returncode
    if code:
        raise SystemExit(code if code > 0 else 128 - code)
    return True
