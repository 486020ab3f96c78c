"""The environment that TensorRT-LLM lives in, as commands: a virtual environment's programs, or a container's."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.engines.tensorrt_llm.worker import MARK, REFUSED
from pipeline.errors import BuildError
from pipeline.files import atomic_folder, storage_errors, write_json
from pipeline.params import TensorRTLLM
from pipeline.serving import process

CACHE = Path(".cache/tensorrt_llm")  # inside the project, so that a container that mounts the project sees it
PACKAGE = "enginegate_worker"
START = f"""\
import sys

from {PACKAGE}.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
"""
LOOK_TIMEOUT_S = 120
PROBE_TIMEOUT_S = 900
GRACE_S = 10.0
PROGRESS_S = 10.0
TAIL_LINES = 20
# Nothing is looked up on a hub: every model is a local folder.
_ENV = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1"}


@dataclass(frozen=True)
class Runtime:
    """``prefix`` starts a container, ``bin`` is a virtual environment's folder: one of them is there."""

    prefix: tuple[str, ...]
    bin: Path | None
    env: dict[str, str]

    @property
    def place(self) -> str:
        """For messages."""
        return str(self.bin) if self.bin else " ".join(self.prefix)

    def missing(self) -> str:
        """Why no command can be started here; empty when one can."""
        if self.bin is not None:
            python = self.bin / "python"
            return "" if os.access(python, os.X_OK) else f"{python} is not there"
        return "" if shutil.which(self.prefix[0]) else f"{self.prefix[0]} is not on the PATH"

    def command(self, program: str, *arguments: str) -> tuple[str, ...]:
        """The command line of a program of this environment, with our variables set inside it."""
        env = dict(self.env)
        if self.bin is not None:
            env["PATH"] = f"{self.bin}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        return (*self.prefix, "env", *(f"{name}={value}" for name, value in env.items()), program, *arguments)

    def worker(self, *arguments: str) -> tuple[str, ...]:
        """The command line of our worker (``worker/``), copied to where this environment sees it."""
        return self.command("python" if self.bin else "python3", str(_worker_folder()), *arguments)

    def look(self) -> dict[str, Any]:
        """What is installed and which GPUs there are, in a second or two. Raises BuildError."""
        return self._ask("look", LOOK_TIMEOUT_S)

    def probe(self) -> dict[str, Any]:
        """``look`` and every name that the installed TensorRT-LLM knows, which imports it. Raises BuildError."""
        return self._ask("probe", PROBE_TIMEOUT_S)

    def _ask(self, command: str, timeout_s: float) -> dict[str, Any]:
        argv = self.worker(command)
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BuildError(f"{self.place}: {error}", _NEXT) from error
        return answer_of(done.stdout, done.returncode, done.stdout + done.stderr, self.place)


_NEXT = "set engine.tensorrt_llm.python or .container in params.yaml (docs/tensorrt-llm.md)"


def open_runtime(params: TensorRTLLM) -> Runtime:
    """The runtime of ``params.yaml``; whether it is there is for ``missing`` to say."""
    env = {**_ENV, **params.env}
    if params.container is None:
        return Runtime((), Path(params.python).absolute().parent, env)
    filled = params.container
    for name, value in {"project": Path.cwd(), "uid": os.getuid(), "gid": os.getgid()}.items():
        filled = filled.replace(f"{{{name}}}", str(value))
    return Runtime(tuple(shlex.split(filled)), None, env)


def answer_of(output: str, code: int, everything: str, place: str) -> dict[str, Any]:
    """The worker's answer: JSON behind the mark on its last such line. Raises BuildError when there is none."""
    marked = [line for line in output.splitlines() if line.startswith(MARK)]
    answer: dict[str, Any] = json.loads(marked[-1].removeprefix(MARK)) if marked else {}
    if code == REFUSED and marked:
        raise BuildError(answer["message"], answer["next_step"])
    if code or not marked:
        raise BuildError(f"{place}: {explain_code(code)}:\n{tail(everything)}", _NEXT)
    return answer


@contextlib.contextmanager
def job_file(folder: Path, job: dict[str, Any]) -> Iterator[Path]:
    """The worker's arguments as a file inside ``folder``; absolute paths, as a container mounts them."""
    path = folder.absolute() / "job.json"
    write_json(path, job)
    yield path
    path.unlink()


def run_logged(argv: Sequence[str], log: Path, label: str, timeout_s: float) -> int:
    """Runs a command to its end with its output in ``log``; returns its exit code (128 + n for signal n).

    The command ends with us, whatever ends us (``serving/supervise.py``). Raises BuildError after ``timeout_s``.
    """
    supervisor = Path(process.__file__).with_name("supervise.py")
    begin = told = time.monotonic()
    with storage_errors(log):
        log.parent.mkdir(parents=True, exist_ok=True)
        output = log.open("ab")
    with output:
        child = subprocess.Popen(
            [sys.executable, "-I", str(supervisor), str(GRACE_S), *argv],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert child.stdin is not None
        try:
            while child.poll() is None:
                now = time.monotonic()
                if now - begin > timeout_s:
                    raise BuildError(
                        f"{label}: not done within {timeout_s:g} s; the last lines of {log}:\n{tail(log)}",
                        "raise engine.tensorrt_llm.build_timeout_s, or see the log for what it waits for",
                    )
                if now - told >= PROGRESS_S:
                    told = now
                    print(f"{label}: {now - begin:.0f} s: {tail(log, 1).strip()[:100]}", flush=True)
                time.sleep(0.05)
        finally:
            child.stdin.close()  # ends the command if it still runs
            child.wait(GRACE_S + 10)
    return child.returncode


def explain_code(code: int) -> str:
    """An exit code in words."""
    if code in (-9, 137):
        return (
            f"exit code {code}: killed (SIGKILL). On a machine that runs out of host memory the kernel does that; "
            "`dmesg` names the process"
        )
    return f"exit code {code}"


def tail(source: Path | str, lines: int = TAIL_LINES) -> str:
    """The last lines of a log."""
    text = source.read_text(encoding="utf-8", errors="replace") if isinstance(source, Path) else source
    kept = [line for line in text.splitlines() if line.strip()][-lines:]
    return "\n".join(f"  | {line}" for line in kept) or "  | (empty)"


def _worker_folder() -> Path:
    """A folder that ``python FOLDER`` runs: the worker as the package ``enginegate_worker``, and what starts it.

    Its name is of the worker's content. Nothing is set in the environment, which may have a PYTHONPATH of its own.
    """
    source = Path(__file__).with_name("worker")
    files = sorted(source.glob("*.py"))
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    folder = CACHE.absolute() / digest
    if not folder.exists():
        with atomic_folder(folder) as part:
            (part / PACKAGE).mkdir()
            (part / "__main__.py").write_text(START, encoding="utf-8")
            for file in files:
                shutil.copy(file, part / PACKAGE / file.name)
    return folder
