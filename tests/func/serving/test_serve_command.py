"""``enginegate serve``: what it refuses before it loads anything, and how it stops."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.commands.serve import eos_token_ids
from pipeline.serving.process import choose_port
from tests import tiny

# `enginegate serve` with a fake executor in place of the one that the manifest names.
SERVE = """
import sys
import pipeline.engines
from pipeline.cli import main
from tests.unit.serving.fake_engine import FakeExecutor
pipeline.engines.load_executor = lambda folder: FakeExecutor(step_s=0.01)
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    folder = tmp_path / "toy"
    tiny.tokenizer().save_pretrained(folder / "tokenizer")
    (folder / "manifest.json").write_text("{}")
    return folder


def serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipeline.cli", "serve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_folder_that_is_no_engine(tmp_path: Path) -> None:
    done = serve(str(tmp_path))
    assert done.returncode == 65
    assert "no manifest.json" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_in_use(engine: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = serve(str(engine), "--port", str(port))
    assert done.returncode == 69
    assert f"port {port} on 127.0.0.1: Address already in use" in done.stderr
    assert "next: " in done.stderr


@pytest.mark.parametrize("port", ["70000", "-1", "http"])
def test_what_is_no_port(engine: Path, port: str) -> None:
    done = serve(str(engine), f"--port={port}")
    assert done.returncode == 64
    assert f"{port!r} is no port" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_and_stops_in_order(engine: Path, number: signal.Signals) -> None:
    import time
    import urllib.request

    port = choose_port()
    command = [sys.executable, "-c", SERVE, "serve", str(engine), "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(2)]
    assert f"toy: http://127.0.0.1:{port}/v1/completions" in lines[1]
    body = {"prompt": "translate a1 =>", "max_tokens": 50, "ignore_eos": True, "return_token_ids": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    for _ in range(100):  # the line is printed just before the port is bound
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.05)
    with urllib.request.urlopen(request) as response:
        reply = json.load(response)
    assert reply["model"] == "toy"
    assert reply["choices"][0]["prompt_token_ids"] == tiny.tokenizer()("translate a1 =>")["input_ids"]
    process.send_signal(number)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 0
    assert errors == ""


def test_every_end_token_counts(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 9}')
    assert eos_token_ids(tmp_path, tiny.tokenizer()) == {2, 7, 8, 9}
