"""The prefix of ``params.launcher``, which takes a command to a GPU: ``srun``, ``sky exec``, ``docker run``."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from pipeline.params import Params


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
