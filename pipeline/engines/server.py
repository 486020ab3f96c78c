"""Our small OpenAI-compatible server over an engine: ``/health``, ``/v1/models``, ``/v1/completions``.

It decodes greedily and nothing else. A parameter that would ask for something else is refused with HTTP 400
rather than ignored, because an ignored parameter is a silently wrong answer. Token ids are sent as vLLM sends
them (``return_token_ids``; the stop token is included and counted), so one client asks both.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any, Literal

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline import __version__
from pipeline.engines.scheduler import Failure, Job, Scheduler, Token
from pipeline.errors import ServerError

MAX_BODY = 32 * 2**20  # bytes
SCHEDULER = web.AppKey("scheduler", Scheduler)


class StreamOptions(BaseModel):
    """``stream_options`` of a request."""

    include_usage: bool = False


class CompletionBody(BaseModel):
    """The body of ``/v1/completions``. Literal types are the parameters that only have one value here."""

    model_config = ConfigDict(extra="ignore", strict=True)

    prompt: list[int] | str
    model: str | None = None
    max_tokens: int = Field(default=16, ge=1)
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    add_special_tokens: bool = True
    return_token_ids: bool | None = None
    n: Literal[1] = 1
    best_of: Literal[1] | None = None
    temperature: float | None = Field(default=None, ge=0, le=0)
    repetition_penalty: float | None = Field(default=None, ge=1, le=1)
    presence_penalty: float | None = Field(default=None, ge=0, le=0)
    frequency_penalty: float | None = Field(default=None, ge=0, le=0)
    min_tokens: Literal[0] = 0
    echo: Literal[False] | None = None
    stop: Literal[""] | list[str] | None = Field(default=None, max_length=0)
    logprobs: None = None
    prompt_logprobs: None = None
    logit_bias: dict[str, float] | None = Field(default=None, max_length=0)
    suffix: None = None


class Refusal(Exception):  # noqa: N818  it is an answer, not a fault of ours
    """An HTTP error in OpenAI's form."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}}


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

    async def health(self, _request: web.Request) -> web.Response:
        """200 while requests are taken; 503 with the reason after the engine failed."""
        failure = self.scheduler.failure
        return web.Response(text=failure or "", status=503 if failure else 200)

    async def version(self, _request: web.Request) -> web.Response:
        """The server's version, where vLLM has its own."""
        return web.json_response({"version": __version__})

    async def models(self, _request: web.Request) -> web.Response:
        """The one model and its limit."""
        limit = self.scheduler.executor.max_tokens
        entry = {"id": self.model, "object": "model", "owned_by": "enginegate", "max_model_len": limit}
        return web.json_response({"object": "list", "data": [entry]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Answers one prompt, whole or as a stream."""
        body = _parse_body(await request.read())
        if body.model not in (None, self.model):
            raise Refusal(404, f"the model {body.model!r} does not exist; this is {self.model!r}", "NotFoundError")
        reply = _Reply(body, self._prompt(body), self.tokenizer, self.model)
        tokens, job = self._submit(body, reply.prompt)
        try:
            if body.stream:
                return await self._stream(request, reply, tokens)
            async for token in tokens:
                reply.take(token)
            return web.json_response(reply.whole())
        except ServerError as error:
            raise Refusal(500, error.message, "InternalServerError") from error
        finally:
            job.cancelled = True  # no effect on a finished job; frees the row of a client that has gone

    def _prompt(self, body: CompletionBody) -> list[int]:
        """The prompt's token ids, checked against the engine."""
        executor = self.scheduler.executor
        if isinstance(body.prompt, str):
            prompt = list(self.tokenizer(body.prompt, add_special_tokens=body.add_special_tokens)["input_ids"])
        else:
            prompt = body.prompt
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

    def _submit(self, body: CompletionBody, prompt: list[int]) -> tuple[AsyncIterator[Token], Job]:
        """Queues the request; its tokens come back from the worker thread to this event loop."""
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Token | Failure] = asyncio.Queue()
        stop = frozenset(body.stop_token_ids or ()) | (frozenset() if body.ignore_eos else self.eos_token_ids)
        job = Job(prompt, body.max_tokens, stop, lambda event: _hand_over(loop, queue, event))
        try:
            self.scheduler.submit(job)
        except ServerError as error:
            raise Refusal(503, error.message, "ServiceUnavailableError") from error
        return _tokens(queue), job

    async def _stream(self, request: web.Request, reply: _Reply, tokens: AsyncIterator[Token]) -> web.StreamResponse:
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


class _Reply:
    """One answer as it grows, in OpenAI's form."""

    def __init__(self, body: CompletionBody, prompt: list[int], tokenizer: Any, model: str) -> None:
        self.body = body
        self.prompt = prompt
        self.model = model
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self._text = _TextStream(tokenizer, body.skip_special_tokens)

    def take(self, token: Token) -> str:
        """Adds a token; returns the text that it completes."""
        self.token_ids.append(token.id)
        self.finish_reason = token.finish_reason
        visible = [] if token.finish_reason == "stop" else [token.id]
        return self._text.push(visible, final=token.finish_reason is not None)

    def chunk(self, token: Token) -> dict[str, Any]:
        """Adds a token; returns its event."""
        text = self.take(token)
        return self.envelope([self._choice(text, [token.id], first=len(self.token_ids) == 1)])

    def whole(self) -> dict[str, Any]:
        """The answer without streaming."""
        return self.envelope([self._choice(self._text.text, self.token_ids, first=True)], usage=True)

    def envelope(self, choices: list[dict[str, Any]], usage: bool = False) -> dict[str, Any]:
        """What surrounds the choices."""
        reply: dict[str, Any] = {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
        if usage:
            counts = len(self.prompt), len(self.token_ids)
            names = ("prompt_tokens", "completion_tokens", "total_tokens")
            reply["usage"] = dict(zip(names, (*counts, sum(counts)), strict=True))
        return reply

    def _choice(self, text: str, token_ids: list[int], first: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": 0,
            "text": text,
            "logprobs": None,
            "finish_reason": self.finish_reason,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = token_ids
            choice["prompt_token_ids"] = self.prompt if first else None
        return choice


class _TextStream:
    """Token ids into text, piece by piece: a piece is held back while it ends inside a character.

    Only the last few ids are decoded again, with one settled piece before them, because a token's text can
    depend on the token before it (a leading space).
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool) -> None:
        self.text = ""
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._context = 0  # ids before this place are settled and no longer needed
        self._settled = 0  # ids before this place are in ``text``

    def push(self, ids: list[int], final: bool) -> str:
        """Adds ids; returns the text that they complete. ``final`` gives out even a broken character."""
        self._ids += ids
        before = self._decode(self._ids[self._context : self._settled])
        now = self._decode(self._ids[self._context :])
        if now.endswith("\N{REPLACEMENT CHARACTER}") and not final:
            return ""
        self._context, self._settled = self._settled, len(self._ids)
        piece = now[len(before) :]
        self.text += piece
        return piece

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False))


def _parse_body(content: bytes) -> CompletionBody:
    try:
        return CompletionBody.model_validate_json(content)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        param = ".".join(map(str, problem["loc"])) or None
        raise Refusal(400, f"{param or 'body'}: {problem['msg']}", param=param) from error


def _event(value: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _hand_over(loop: asyncio.AbstractEventLoop, queue: asyncio.Queue[Token | Failure], event: Token | Failure) -> None:
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
