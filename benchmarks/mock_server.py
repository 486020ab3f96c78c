"""An OpenAI-compatible completions server of known speed, cheap enough to measure clients with.

``python -m benchmarks.mock_server --port 8911 [--ttft-ms 20] [--spread-ms 0] [--tpot-ms 5]``

It answers ``max_tokens`` tokens, one in each chunk, as vLLM writes them: the first after ``ttft`` plus a share of
``spread`` (evenly spread over the requests, so percentiles are known: p50 is ttft + spread / 2), each further one
after ``tpot``. A plain asyncio protocol with its frames made beforehand: a tenth of a framework's CPU. It is a
measuring instrument for 127.0.0.1, not a web server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
from functools import cache
from typing import Any

from pipeline.bench.workers import NICE

try:
    import uvloop
except ImportError:  # the server is then the dearer one
    uvloop = None

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
GOLDEN = 0.6180339887498949  # multiples of it, modulo 1, fill the interval evenly
END = b"0\r\n\r\n"


def event(value: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def framed(content: bytes) -> bytes:
    """One chunk of HTTP's chunked encoding."""
    return b"%x\r\n%s\r\n" % (len(content), content)


@cache
def frames(count: int) -> list[bytes]:
    """The chunks of an answer of ``count`` tokens."""
    return [framed(event(_delta(place, "length" if place == count - 1 else None))) for place in range(count)]


def _delta(place: int, finish: str | None) -> dict[str, Any]:
    choice = {"index": 0, "text": " word", "logprobs": None, "finish_reason": finish, "stop_reason": None}
    choice |= {"token_ids": [100 + place], "prompt_logprobs": None, "prompt_token_ids": None}
    return {"id": "cmpl-0", "object": "text_completion", "created": 0, "model": "mock", "choices": [choice]}


def last(prompt: int, count: int) -> bytes:
    """Usage, ``[DONE]`` and the end of the body."""
    usage = {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}
    body = {"id": "cmpl-0", "object": "text_completion", "created": 0, "model": "mock", "choices": [], "usage": usage}
    return framed(event(body)) + framed(b"data: [DONE]\n\n") + END


class Speed:
    """The times of a server, in seconds."""

    def __init__(self, ttft: float, spread: float, tpot: float) -> None:
        self.ttft, self.spread, self.tpot = ttft, spread, tpot
        self.asked = 0

    def first(self) -> float:
        """Seconds to the first token of the next request."""
        self.asked += 1
        return self.ttft + self.spread * (self.asked * GOLDEN % 1)


class Connection(asyncio.Protocol):
    """One client's connection; requests on it come one after another."""

    def __init__(self, speed: Speed) -> None:
        self.speed = speed
        self.loop = asyncio.get_running_loop()
        self.transport: asyncio.Transport | None = None
        self.buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, _error: Exception | None) -> None:
        self.transport = None

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        end = self.buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = self.buffer[:end]
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0] or 0)
        if len(self.buffer) < end + 4 + length:
            return
        body = self.buffer[end + 4 : end + 4 + length]
        self.buffer = self.buffer[end + 4 + length :]
        if length:
            self._answer(json.loads(body))
        else:
            self._tell(head.split(b" ", 2)[1].decode())

    def _tell(self, path: str) -> None:
        """The model list for ``/v1/models``, an empty object for everything else."""
        models = {"object": "list", "data": [{"id": "mock", "object": "model", "max_model_len": 8192}]}
        content = json.dumps(models if path.endswith("/models") else {}).encode()
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(content)
        self._write(head + content)

    def _answer(self, body: dict[str, Any]) -> None:
        prompt, count = body["prompt"], int(body.get("max_tokens") or 16)
        tokens = len(prompt) if isinstance(prompt, list) else len(prompt.split())
        self._write(HEAD)
        self._step(frames(count), 0, tokens, self.loop.time() + self.speed.first())

    def _step(self, parts: list[bytes], place: int, prompt: int, due: float) -> None:
        self.loop.call_at(due, self._send, parts, place, prompt, due)

    def _send(self, parts: list[bytes], place: int, prompt: int, due: float) -> None:
        if self.transport is None:
            return
        if place == len(parts) - 1:
            self._write(parts[place] + last(prompt, len(parts)))
        else:
            self._write(parts[place])
            self._step(parts, place + 1, prompt, due + self.speed.tpot)

    def _write(self, data: bytes) -> None:
        if self.transport is not None:
            self.transport.write(data)


async def serve(port: int, speed: Speed) -> None:
    """Serves until it is cancelled."""
    server = await asyncio.get_running_loop().create_server(lambda: Connection(speed), "127.0.0.1", port, backlog=4096)
    async with server:
        await server.serve_forever()


def main() -> None:
    """Serves on 127.0.0.1 until it is ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8911)
    parser.add_argument("--ttft-ms", type=float, default=20)
    parser.add_argument("--spread-ms", type=float, default=0)
    parser.add_argument("--tpot-ms", type=float, default=5)
    args = parser.parse_args()
    with contextlib.suppress(PermissionError):  # where it is allowed: as the client, before whatever else runs here
        os.setpriority(os.PRIO_PROCESS, 0, NICE)
    speed = Speed(args.ttft_ms / 1000, args.spread_ms / 1000, args.tpot_ms / 1000)
    factory = uvloop.new_event_loop if uvloop else None
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(serve(args.port, speed))


if __name__ == "__main__":
    main()
