"""Our small OpenAI-compatible server over an engine: ``/health``, ``/v1/models``, ``/v1/completions``.

It decodes greedily and nothing else. A parameter that would ask for something else is refused with HTTP 400
rather than ignored, because an ignored parameter is a silently wrong answer. Token ids are sent as vLLM sends
them (``return_token_ids``; the stop token is included and counted), so one client asks both.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any, TypeVar

from aiohttp import web

from pipeline import __version__
from pipeline.engines.metrics import CONTENT_TYPE, Metrics
from pipeline.engines.scheduler import Failure, Job, Scheduler, ScoreJob, Scorer, Scores, Token
from pipeline.engines.wire import CompletionBody, Refusal, Reply, parse_body
from pipeline.errors import ServerError

MAX_BODY = 32 * 2**20  # bytes
SCHEDULER = web.AppKey("scheduler", Scheduler)
Event = TypeVar("Event")


def build_app(scheduler: Scheduler, tokenizer: Any, model: str, eos_token_ids: frozenset[int]) -> web.Application:
    """The web application. ``eos_token_ids`` end an answer unless a request says ``ignore_eos``.

    The application owns ``scheduler``: it is drained when the server stops and closed at the end. Run it with
    ``handler_cancellation=True``, so that a client that has gone gives its row back.
    """
    api = _Api(scheduler, tokenizer, model, eos_token_ids)
    app = web.Application(client_max_size=MAX_BODY, middlewares=[_refusals])
    app[SCHEDULER] = scheduler
    app.router.add_get("/health", api.health)
    app.router.add_get("/version", api.version)
    app.router.add_get("/metrics", api.tell)
    app.router.add_get("/v1/models", api.models)
    app.router.add_post("/v1/completions", api.completions)
    app.on_shutdown.append(_drain)
    app.on_cleanup.append(_close)
    return app


async def _drain(app: web.Application) -> None:
    app[SCHEDULER].drain()


async def _close(app: web.Application) -> None:
    await asyncio.to_thread(app[SCHEDULER].close)


@web.middleware
async def _refusals(request: web.Request, handler: Any) -> web.StreamResponse:
    try:
        response: web.StreamResponse = await handler(request)
    except Refusal as refusal:
        return web.json_response(refusal.body(), status=refusal.status)
    except web.HTTPException as error:  # unknown path, method or a body over the limit
        other = Refusal(error.status, f"{request.method} {request.path}: {error.reason}", "NotFoundError")
        return web.json_response(other.body(), status=other.status)
    return response


class _Api:
    """The handlers."""

    def __init__(self, scheduler: Scheduler, tokenizer: Any, model: str, eos_token_ids: frozenset[int]) -> None:
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.model = model
        self.eos_token_ids = eos_token_ids
        self.metrics = Metrics(scheduler)

    async def health(self, _request: web.Request) -> web.Response:
        """200 while requests are taken; 503 with the reason after the engine failed."""
        failure = self.scheduler.failure
        return web.Response(text=failure or "", status=503 if failure else 200)

    async def version(self, _request: web.Request) -> web.Response:
        """The server's version, where vLLM has its own."""
        return web.json_response({"version": __version__})

    async def tell(self, _request: web.Request) -> web.Response:
        """Queue and batch, and where the time of finished requests went."""
        return web.Response(body=self.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def models(self, _request: web.Request) -> web.Response:
        """The one model and its limit."""
        limit = self.scheduler.executor.max_tokens
        entry = {"id": self.model, "object": "model", "owned_by": "enginegate", "max_model_len": limit}
        return web.json_response({"object": "list", "data": [entry]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Answers one prompt, whole or as a stream."""
        body = parse_body(await request.read())
        if body.model not in (None, self.model):
            raise Refusal(404, f"the model {body.model!r} does not exist; this is {self.model!r}", "NotFoundError")
        reply = Reply(body, self._prompt(body), self.tokenizer, self.model)
        if body.scores:
            return web.json_response(reply.scored(await self._score(reply.prompt), self._stop(body)))
        tokens, job = self._submit(body, reply.prompt)
        try:
            if body.stream:
                return await self._stream(request, reply, tokens)
            async for token in tokens:
                reply.take(token)
                if reply.cut():
                    break
            return web.json_response(reply.whole())
        except ServerError as error:
            raise Refusal(500, error.message, "InternalServerError") from error
        finally:
            job.cancelled = True  # no effect on a finished job; frees the row of a client that has gone
            if job.finished:
                self.metrics.finished(job)

    def _prompt(self, body: CompletionBody) -> list[int]:
        """The prompt's token ids, checked against the engine."""
        executor = self.scheduler.executor
        if isinstance(body.prompt, str):
            prompt = list(self.tokenizer(body.prompt, add_special_tokens=body.add_special_tokens)["input_ids"])
        else:
            prompt = [token for part in body.prompt for token in (part if isinstance(part, list) else [part])]
        if not prompt:
            raise Refusal(400, "the prompt is empty", param="prompt")
        wrong = next((token for token in prompt if not 0 <= token < executor.vocab_size), None)
        if wrong is not None:
            raise Refusal(400, f"token {wrong} is outside the vocabulary of {executor.vocab_size}", param="prompt")
        if len(prompt) + body.max_tokens > executor.max_tokens:
            raise Refusal(
                400,
                f"{len(prompt)} prompt tokens and max_tokens={body.max_tokens} exceed this engine's limit of "
                f"{executor.max_tokens} tokens; nothing was cut",
                param="max_tokens",
            )
        return prompt

    def _stop(self, body: CompletionBody) -> frozenset[int]:
        return frozenset(body.stop_token_ids or ()) | (frozenset() if body.ignore_eos else self.eos_token_ids)

    async def _score(self, prompt: list[int]) -> Scores:
        """Queues the prompt and waits for its scores."""
        if not isinstance(self.scheduler.executor, Scorer):
            raise Refusal(
                400, "this engine's backend gives no log-probabilities of prompts (eval.scored: 0)", param="echo"
            )
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Scores | Failure] = asyncio.Queue()
        job = ScoreJob(prompt, lambda event: _hand_over(loop, queue, event))
        self._queue(job)
        try:
            event = await queue.get()
        finally:
            job.cancelled = True  # as for an answer: no effect on a finished job
        if isinstance(event, Failure):
            raise Refusal(500, event.message, "InternalServerError")
        return event

    def _queue(self, job: Job | ScoreJob) -> None:
        try:
            self.scheduler.submit(job)
        except ServerError as error:
            raise Refusal(503, error.message, "ServiceUnavailableError") from error

    def _submit(self, body: CompletionBody, prompt: list[int]) -> tuple[AsyncIterator[Token], Job]:
        """Queues the request; its tokens come back from the worker thread to this event loop."""
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Token | Failure] = asyncio.Queue()
        job = Job(prompt, body.max_tokens, self._stop(body), lambda event: _hand_over(loop, queue, event))
        self._queue(job)
        return _tokens(queue), job

    async def _stream(self, request: web.Request, reply: Reply, tokens: AsyncIterator[Token]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        try:
            async for token in tokens:
                await response.write(_event(reply.chunk(token)))
            if reply.body.stream_options and reply.body.stream_options.include_usage:
                await response.write(_event(reply.envelope([], usage=True)))
        except ServerError as error:  # the status line has gone out: an event has to say it
            await response.write(_event(Refusal(500, error.message, "InternalServerError").body()))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


def _event(value: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _hand_over(loop: asyncio.AbstractEventLoop, queue: asyncio.Queue[Event], event: Event) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(queue.put_nowait, event)


async def _tokens(queue: asyncio.Queue[Token | Failure]) -> AsyncIterator[Token]:
    """The tokens up to the last. Raises ServerError for a failure."""
    while True:
        event = await queue.get()
        if isinstance(event, Failure):
            raise ServerError(event.message)
        yield event
        if event.finish_reason is not None:
            return
