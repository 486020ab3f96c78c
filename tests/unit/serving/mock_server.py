"""An OpenAI-compatible server that follows a script: known times, known faults.

A script is a list of steps: a number is a pause in seconds, bytes are sent as they are, a dict is sent as an event,
``None`` breaks the connection off, an ``asyncio.Event`` is waited for; a ``Refuse`` in front answers with its HTTP
status instead.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web

Script = list[Any]


@dataclass(frozen=True)
class Refuse:
    """An HTTP error."""

    status: int
    message: str = "no room"


DONE = b"data: [DONE]\n\n"


def chunk(ids: list[int] | None, text: str = "", finish: str | None = None, **extra: Any) -> dict[str, Any]:
    """One delta event."""
    return {"choices": [{"index": 0, "text": text, "token_ids": ids, "finish_reason": finish, **extra}]}


def usage(prompt: int, completion: int) -> dict[str, Any]:
    """The last event."""
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}}


@contextmanager
def scripted(
    script: Callable[[dict[str, Any]], Script], status: int = 200
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Serves on a thread; yields the URL and the list of request bodies seen so far."""
    seen: list[dict[str, Any]] = []

    async def completions(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        seen.append(body)
        steps = [Refuse(status)] if status != 200 else script(body)
        if steps and isinstance(steps[0], Refuse):
            error = {"message": steps[0].message, "code": steps[0].status}
            return web.json_response({"error": error}, status=steps[0].status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for step in steps:
            if step is None:
                assert request.transport is not None
                request.transport.abort()
            elif isinstance(step, int | float):
                await asyncio.sleep(step)
            elif isinstance(step, asyncio.Event):
                await step.wait()
            else:
                await response.write(step if isinstance(step, bytes) else f"data: {json.dumps(step)}\n\n".encode())
        return response

    async def models(_request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "mock"}]})

    async def health(_request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_post("/v1/completions", completions)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/health", health)
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(app, shutdown_timeout=0.1)

    async def start() -> int:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return int(runner.addresses[0][1])

    port = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}", seen
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
