"""Starts, watches and stops any OpenAI-compatible server; or checks one that already runs.

A server is a command line, so each backend can live in an environment of its own. It is started under
``supervise.py``, which ends it together with us, whatever ends us. What it prints goes to a log file, and the
last lines of that file are part of every ServerError that leaves the ``with`` block.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path

from pipeline.errors import ServerError
from pipeline.files import storage_errors
from pipeline.serving.dialects import Dialect

HOST = "127.0.0.1"
GRACE_S = 15.0  # from SIGTERM to SIGKILL
PROGRESS_S = 10.0
TAIL_LINES = 20


@dataclass(frozen=True)
class ServerCommand:
    """A server's command line. It must listen on ``HOST``:``port``; ``env`` is added to our environment; it runs on
    ``gpus`` GPUs, where there are any; ``dialect`` is how it wants to be asked."""

    name: str
    argv: tuple[str, ...]
    port: int
    env: Mapping[str, str] = field(default_factory=dict)
    gpus: int = 1
    dialect: Dialect = "vllm"


@dataclass(frozen=True)
class Server:
    """A server that answered its health check. ``log`` and ``pid`` (of the process that watches it, its parent) are
    None for one that we did not start; ``start_s`` is how long it took to become healthy; ``others`` are further
    servers of the same engine; ``gpus`` is how many GPUs it runs on, where there are any."""

    name: str
    url: str
    log: Path | None
    pid: int | None = None
    start_s: float | None = None
    others: tuple[Server, ...] = ()
    dialect: Dialect = "vllm"
    gpus: int = 1

    @property
    def urls(self) -> tuple[str, ...]:
        """All of them, to be asked in turn."""
        return (self.url, *(server.url for server in self.others))


def choose_port(port: int = 0, host: str = HOST) -> int:
    """``port`` if it is free, or any free one for 0. Raises ServerError for a port in use."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ServerError(
                f"port {port} on {host}: {error.strerror}",
                f"choose another port, or stop what listens there (ss -ltnp 'sport = :{port}' shows it)",
            ) from error
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def started(command: ServerCommand, log: Path, timeout_s: float, grace_s: float = GRACE_S) -> Iterator[Server]:
    """Runs the server for the length of the block; it is healthy when the block begins and gone when it ends.

    Raises ServerError when it dies or is not healthy within ``timeout_s`` seconds, and adds the last lines of
    ``log`` to any ServerError that the block raises.
    """
    with starting(command, log, timeout_s, grace_s) as wait:
        yield wait()


@contextlib.contextmanager
def starting(
    command: ServerCommand, log: Path, timeout_s: float, grace_s: float = GRACE_S
) -> Iterator[Callable[[], Server]]:
    """As ``started``, but the block begins at once: call what it gets to wait until the server is healthy."""
    url = f"http://{HOST}:{command.port}"
    choose_port(command.port)
    with _supervised(command, log, grace_s) as process:

        def wait() -> Server:
            start_s = _wait_until_healthy(command.name, url, process, log, timeout_s)
            return Server(command.name, url, log, process.pid, start_s, dialect=command.dialect, gpus=command.gpus)

        try:
            yield wait
        except ServerError as error:
            raise ServerError(f"{error.message}\n{_state(command.name, process, log)}", error.next_step) from error


@contextlib.contextmanager
def running(url: str, name: str = "server") -> Iterator[Server]:
    """A server that already runs at ``url`` and is left running. Raises ServerError when it is not healthy."""
    url = url.rstrip("/").removesuffix("/v1")
    problem = _health_problem(url)
    if problem:
        raise ServerError(f"{name}: {url}/health: {problem}", "start that server, or correct its URL in params.yaml")
    yield Server(name, url, None)


@contextlib.contextmanager
def _supervised(command: ServerCommand, log: Path, grace_s: float) -> Iterator[subprocess.Popen[bytes]]:
    supervisor = Path(__file__).with_name("supervise.py")
    argv = [sys.executable, "-I", str(supervisor), str(grace_s), *command.argv]
    with storage_errors(log):
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **command.env},
                start_new_session=True,  # Ctrl-C reaches us alone; we stop the server in order
            )
    try:
        yield process
    finally:
        _stop(command.name, process, grace_s)


def _stop(name: str, process: subprocess.Popen[bytes], grace_s: float) -> None:
    """Closes the supervisor's pipe, which ends the server, also when a second Ctrl-C interrupts the wait."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # the server, and so its supervisor, has ended already
        process.stdin.close()
    try:
        process.wait(grace_s + 10)
    except subprocess.TimeoutExpired as error:
        raise ServerError(
            f"{name}: the server outlived SIGKILL by 10 s",
            "it hangs in a driver: `ps` shows state D; reboot if it stays",
        ) from error


def _wait_until_healthy(name: str, url: str, process: subprocess.Popen[bytes], log: Path, timeout_s: float) -> float:
    """Returns the seconds that it took."""
    begin = time.monotonic()
    told = begin
    while True:
        if process.poll() is not None:
            raise ServerError(f"{name}: the server ended while it started", "the log's last lines say why")
        problem = _health_problem(url)
        if not problem:
            took = time.monotonic() - begin
            print(f"{name}: server ready after {took:.0f} s", flush=True)
            return took
        now = time.monotonic()
        if now - begin > timeout_s:
            raise ServerError(
                f"{name}: the server was not healthy within {timeout_s:g} s ({problem})",
                "see the log; if it is only slow, raise baseline.start_timeout_s in params.yaml",
            )
        if now - told >= PROGRESS_S:
            told = now
            last = _tail(log, 1)
            print(f"{name}: server starts, {now - begin:.0f} s: {last[0][:100] if last else '...'}", flush=True)
        time.sleep(0.2)


def healthy(server: Server) -> bool:
    """Whether the server answers its health check now."""
    return not _health_problem(server.url)


def _health_problem(url: str) -> str:
    """Why the server is not healthy; empty when it is. No proxy is asked: servers are ours or nearby."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/health", timeout=5) as response:
            return "" if response.status == 200 else f"HTTP {response.status}"
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code}: {error.read(200).decode(errors='replace')}"
    except (OSError, HTTPException, ValueError) as error:
        return str(error)


def _state(name: str, process: subprocess.Popen[bytes], log: Path) -> str:
    """Whether the server still runs, and the last lines of its log."""
    try:
        state = f"ended with exit code {process.wait(1)}"  # a broken connection is seen a moment before the death
    except subprocess.TimeoutExpired:
        state = "still runs"
    lines = "\n".join(f"  | {line}" for line in _tail(log, TAIL_LINES)) or "  | (empty)"
    return f"the {name} server {state}; the last lines of {log}:\n{lines}"


def _tail(log: Path, lines: int) -> list[str]:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 400 * lines))
        return [line for line in file.read().decode(errors="replace").splitlines() if line.strip()][-lines:]
