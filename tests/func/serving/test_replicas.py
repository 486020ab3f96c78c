"""Several real servers behind one client, and a server behind a stand-in launcher."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.errors import ServerError
from pipeline.params import Params
from pipeline.records import Item
from pipeline.serving.client import ask
from pipeline.serving.process import ServerCommand, choose_port
from pipeline.serving.replicas import placed, replicated
from tests import tiny
from tests.func.serving.test_process import alive, command, processes

# An OpenAI-compatible server that writes down what it was asked and answers with two tokens.
SERVER = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
port, diary = int(sys.argv[1]), sys.argv[2]
open(diary, "a").write(json.dumps({"gpus": os.environ.get("CUDA_VISIBLE_DEVICES"), "word": os.environ.get("WORD")}))
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        open(diary, "a").write("\\n" + json.dumps(body["prompt"]))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        choice = {"index": 0, "text": "", "token_ids": [5, 6], "finish_reason": "length"}
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": 2}
        for event in ({"choices": [choice]}, {"choices": [], "usage": usage}):
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\\n\\n")
        self.wfile.write(b"data: [DONE]\\n\\n")
    def log_message(self, *args):
        pass
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def diarist(folder: Path, place: int) -> ServerCommand:
    script = folder / "diarist.py"
    script.write_text(SERVER)
    port = choose_port()
    argv = (sys.executable, str(script), str(port), str(folder / f"diary{place}"))
    return ServerCommand("toy", argv, port, {"WORD": "with spaces"})


def diary(folder: Path, place: int) -> list[object]:
    return [json.loads(line) for line in (folder / f"diary{place}").read_text().splitlines()]


def test_requests_are_spread_over_replicas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    commands = placed([diarist(tmp_path, 0), diarist(tmp_path, 1)], Params(), gpu=True)
    items = [Item(f"item {place}", "", "", (place + 3, 4)) for place in range(10)]
    with replicated(commands, tmp_path / "logs", timeout_s=20) as server:
        assert len(server.urls) == 2
        records, _ = ask(
            items,
            server.urls,
            "toy",
            tokenizer=tiny.tokenizer(),
            max_new_tokens=2,
            max_tokens=16,
            stop_token_ids=[2],
            concurrency=4,
            order_seed=0,
        )
    assert [record.output_token_ids for record in records] == [(5, 6)] * 10
    first, second = diary(tmp_path, 0), diary(tmp_path, 1)
    assert (first[0], second[0]) == ({"gpus": "3", "word": "with spaces"}, {"gpus": "5", "word": "with spaces"})
    assert len(first[1:]) == len(second[1:]) == 5
    assert sorted(map(str, first[1:] + second[1:])) == sorted(str([place + 3, 4]) for place in range(10))
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {"toy.log", "toy.2.log"}


def test_one_replica_that_dies_ends_them_all(tmp_path: Path) -> None:
    (tmp_path / "good").mkdir()
    (tmp_path / "bad").mkdir()
    commands = [command(tmp_path / "good"), command(tmp_path / "bad", "dies")]
    with pytest.raises(ServerError) as raised, replicated(commands, tmp_path / "logs", timeout_s=20):
        pytest.fail("one was never healthy")
    assert "  | no such model" in str(raised.value)
    assert "toy.2.log" in str(raised.value)
    assert "  | loading good" in str(raised.value)  # the other's log too
    if (tmp_path / "good/pids").exists():
        assert [pid for pid in processes(tmp_path / "good") if alive(pid)] == []


def test_a_server_behind_a_launcher(tmp_path: Path) -> None:
    """A stand-in for srun and the like: it runs the command in an environment that is not ours."""
    launcher = tmp_path / "launch"
    launcher.write_text(f'#!/bin/sh\necho launched "$@" >> \'{tmp_path}/launches\'\nshift\nexec env -i "$@"\n')
    launcher.chmod(0o755)
    params = Params(launcher=f"{launcher} --gpus={{gpus}}")
    [behind] = placed([replace(diarist(tmp_path, 0), gpus=2)], params, gpu=True)
    with replicated([behind], tmp_path / "logs", timeout_s=20) as server:
        assert server.urls == (server.url,)
    assert diary(tmp_path, 0) == [{"gpus": None, "word": "with spaces"}]
    assert (tmp_path / "launches").read_text().startswith("launched --gpus=0,1 env WORD=with spaces ")
