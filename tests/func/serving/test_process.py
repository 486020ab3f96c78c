"""Real processes: start, health, every way to die, and no orphan whatever ends us."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pipeline.errors import ServerError
from pipeline.serving.process import ServerCommand, choose_port, running, started

# A server whose health answer, child process and manners are chosen by its arguments.
SERVER = """
import http.server, os, signal, subprocess, sys
port, mode, pids = int(sys.argv[1]), sys.argv[2], sys.argv[3]
print("loading", mode, os.environ.get("GREETING", ""), flush=True)
if mode == "dies":
    sys.exit("no such model")
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(pids, "w").write(f"{os.getpid()} {child.pid}")
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/die":
            os._exit(3)
        self.send_response(503 if mode == "never" else 200)
        self.end_headers()
        self.wfile.write(b"still loading" if mode == "never" else b"")
    def log_message(self, *args):
        pass
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def command(folder: Path, mode: str = "good", port: int = 0) -> ServerCommand:
    script = folder / "server.py"
    script.write_text(SERVER)
    port = port or choose_port()
    argv = (sys.executable, str(script), str(port), mode, str(folder / "pids"))
    return ServerCommand("toy", argv, port, {"GREETING": "hello from the environment"})


def processes(folder: Path) -> list[int]:
    return [int(pid) for pid in (folder / "pids").read_text().split()]


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def assert_gone(pids: list[int], within_s: float = 5.0) -> None:
    deadline = time.monotonic() + within_s
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [pid for pid in pids if alive(pid)] == []


def test_start_and_stop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "logs" / "toy.log"
    toy = command(tmp_path)
    with started(toy, log, timeout_s=20) as server:
        assert (server.name, server.url, server.log) == ("toy", f"http://127.0.0.1:{toy.port}", log)
        pids = processes(tmp_path)
        assert all(map(alive, pids))
        assert server.pid is not None
        assert server.start_s is not None
        assert 0 <= server.start_s < 20
        assert set(pids) <= {child.pid for child in psutil.Process(server.pid).children(recursive=True)}
        with running(server.url + "/v1/") as same:
            assert same.url == server.url
    assert_gone(pids, within_s=0)  # the server and its child, at once
    assert "hello from the environment" in log.read_text()
    assert "server ready after" in capsys.readouterr().out


def test_a_server_that_dies_at_its_start(tmp_path: Path) -> None:
    with pytest.raises(ServerError) as raised, started(command(tmp_path, "dies"), tmp_path / "log", timeout_s=20):
        pytest.fail("it never was healthy")
    assert "toy: the server ended while it started" in str(raised.value)
    assert "exit code 1" in str(raised.value)
    assert "  | no such model" in str(raised.value)


def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    nothing = ServerCommand("toy", (str(tmp_path / "nothing"),), choose_port())
    with pytest.raises(ServerError, match="FileNotFoundError"), started(nothing, tmp_path / "log", timeout_s=20):
        pytest.fail("it never was healthy")


def test_a_server_that_is_never_healthy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.serving.process.PROGRESS_S", 0.5)
    with pytest.raises(ServerError) as raised, started(command(tmp_path, "never"), tmp_path / "log", timeout_s=1.5):
        pytest.fail("it never was healthy")
    assert "not healthy within 1.5 s (HTTP 503: still loading)" in str(raised.value)
    assert "still runs" in str(raised.value)
    assert "  | loading never" in str(raised.value)
    assert "start_timeout_s" in raised.value.next_step
    assert_gone(processes(tmp_path), within_s=0)


def test_progress_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("pipeline.serving.process.PROGRESS_S", 0.3)
    with pytest.raises(ServerError), started(command(tmp_path, "never"), tmp_path / "log", timeout_s=1.5):
        pytest.fail("it never was healthy")
    assert "toy: server starts, 1 s: loading never" in capsys.readouterr().out


def test_a_server_that_dies_later(tmp_path: Path) -> None:
    """The client's error gets the log's last lines and the exit code."""
    with pytest.raises(ServerError) as raised, started(command(tmp_path), tmp_path / "log", timeout_s=20) as server:
        with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as connection:
            connection.sendall(b"GET /die HTTP/1.0\r\n\r\n")
            connection.recv(1)
        time.sleep(0.5)
        raise ServerError("item 7: the connection broke", "see the log")
    assert str(raised.value).startswith("item 7: the connection broke\nthe toy server ended with exit code 3")
    assert "  | loading good" in str(raised.value)
    assert_gone(processes(tmp_path), within_s=0)  # also the child that it left behind


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ServerError, match=f"port {port} on 127.0.0.1: Address already in use") as raised:
            choose_port(port)
        assert f"sport = :{port}" in raised.value.next_step
        with (
            pytest.raises(ServerError, match=f"port {port}"),
            started(command(tmp_path, port=port), tmp_path / "log", 5),
        ):
            pytest.fail("the port is taken")
    assert not (tmp_path / "pids").exists()  # nothing was started


def test_a_free_port_is_free() -> None:
    port = choose_port()
    assert choose_port(port) == port


def test_a_server_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    begin = time.monotonic()
    with started(command(tmp_path, "stubborn"), tmp_path / "log", timeout_s=20, grace_s=0.5):
        pids = processes(tmp_path)
        begin = time.monotonic()
    assert 0.4 <= time.monotonic() - begin < 5
    assert_gone(pids, within_s=0)


def test_an_error_in_the_block_stops_the_server(tmp_path: Path) -> None:
    with pytest.raises(KeyError), started(command(tmp_path), tmp_path / "log", timeout_s=20):
        pids = processes(tmp_path)
        raise KeyError
    assert_gone(pids, within_s=0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_orphans_whatever_ends_us(tmp_path: Path, number: signal.Signals) -> None:
    toy = command(tmp_path)
    ready = tmp_path / "ready"
    owner = f"""
import time
from pathlib import Path
from pipeline.serving.process import ServerCommand, started
with started(ServerCommand("toy", {toy.argv!r}, {toy.port}), Path({str(tmp_path / "log")!r}), 20, grace_s=2):
    Path({str(ready)!r}).touch()
    time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", owner], stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 20
    while not ready.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    pids = processes(tmp_path)
    assert all(map(alive, pids))
    os.killpg(process.pid, number)  # as a terminal's Ctrl-C does: the whole foreground group
    process.wait(10)
    assert_gone(pids)


def test_a_running_server_that_does_not_answer() -> None:
    with (
        pytest.raises(ServerError, match=r"baseline: http://127.0.0.1:9/health") as raised,
        running("http://127.0.0.1:9", "baseline"),
    ):
        pytest.fail("nothing runs there")
    assert "params.yaml" in raised.value.next_step
