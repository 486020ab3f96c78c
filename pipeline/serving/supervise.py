"""Runs one command in a process group of its own and ends the whole group when its owner is done or gone.

    python supervise.py GRACE_SECONDS COMMAND...

The owner holds the other end of our standard input. It closes it to stop the command, and the kernel closes it
when the owner dies, however it dies. That is why this is a process and not ``prctl(PR_SET_PDEATHSIG)``: that
signal reaches only the direct child (vLLM's engine processes would live on), is sent when the *thread* that
started the child ends, cannot be followed by SIGKILL when the child hangs, and needs a ``preexec_fn``, which is
unsafe in a process with threads. Only the standard library is used, so it starts in milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from types import FrameType

POLL_S = 0.1
SWEEP_S = 3.0
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def main(grace_s: float, command: list[str]) -> int:
    """Runs ``command`` to its end or until asked to stop; returns its exit code (128 + n for signal n)."""
    signal.signal(signal.SIGTERM, _leave)
    _adopt_orphans()
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        while child.poll() is None:
            if select.select([sys.stdin], [], [], POLL_S)[0]:
                break
    finally:
        _end(child, grace_s)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _leave(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _end(child: subprocess.Popen[bytes], grace_s: float) -> None:
    """SIGTERM for the group, and SIGKILL for what is left of it after ``grace_s`` seconds."""
    deadline = time.monotonic() + grace_s
    _signal_group(child.pid, signal.SIGTERM)
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(POLL_S / 2)
    _signal_group(child.pid, signal.SIGKILL)
    child.wait()
    _wait_for_adopted()


def _signal_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return  # nobody is left in the group: that is what we want


def _adopt_orphans() -> None:
    """Makes us the parent of what the command leaves behind, so that we see its end and need no init for it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _wait_for_adopted() -> None:
    """Waits for killed grandchildren: they need a moment to give back their memory."""
    deadline = time.monotonic() + SWEEP_S
    while time.monotonic() < deadline:
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return  # none is left
        if ended == 0:
            time.sleep(POLL_S / 10)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
