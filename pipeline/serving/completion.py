"""One streamed request to an OpenAI-compatible ``/v1/completions``: sent, timed and checked.

Token ids go in and token ids come out: nothing is re-tokenised, so an answer's length is what was generated.
A request either gives a whole, checked answer or a ServerError that names the item; nothing is retried.

On the wire (vLLM, and our own server): ``token_ids`` of a choice hold the ids of that chunk, the stop token
included, and ``usage.completion_tokens`` counts them all.

While an answer arrives, its bytes are only stamped and kept; they are parsed when it is complete. So a client under
load spends its time on reading the clock, not on JSON, and what it measures is the server.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from pipeline.errors import ServerError
from pipeline.serving.dialects import Dialect, trtllm_body

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession, ClientTimeout

CONNECT_S = 30
EXCERPT = 500  # characters of a response body shown in an error
_JSON = {"Content-Type": "application/json"}
Block = tuple[float, bytes]  # when it came (``time.perf_counter``), and what


class RequestError(ServerError):
    """One request did not give a whole, sound answer. ``kind`` is a few words to count failures by."""

    def __init__(self, kind: str, message: str, next_step: str = "see the server's log") -> None:
        super().__init__(message, next_step)
        self.kind = kind


@dataclass(frozen=True)
class CompletionRequest:
    """What is asked: greedy continuation of ``prompt_token_ids`` by at most ``max_tokens`` tokens."""

    id: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    dialect: Dialect = "vllm"

    def body(self, model: str) -> dict[str, Any]:
        """The JSON body. Everything that could change greedy decoding is said explicitly."""
        if self.dialect == "trtllm-serve":
            return trtllm_body(self, model)
        return {
            "model": model,
            "prompt": list(self.prompt_token_ids),
            "max_tokens": self.max_tokens,
            "n": 1,
            "temperature": 0,
            "seed": 0,
            "stop_token_ids": list(self.stop_token_ids),
            "ignore_eos": self.ignore_eos,
            "skip_special_tokens": True,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


@dataclass(frozen=True, slots=True)
class Completion:
    """A checked answer. Times are seconds since the request was sent, which was at ``begin`` of the process clock
    (``time.perf_counter``).

    ``token_ids`` is what was generated, the stop token included; ``token_times`` has one entry for each
    (tokens of one chunk share theirs); ``finish_reason`` is ``stop`` or ``length``.
    """

    token_ids: tuple[int, ...]
    token_times: tuple[float, ...]
    total_s: float
    finish_reason: str
    begin: float

    @property
    def answer_token_ids(self) -> tuple[int, ...]:
        """The ids without the stop token."""
        return self.token_ids[:-1] if self.finish_reason == "stop" else self.token_ids


async def complete(
    session: ClientSession, url: str, model: str, request: CompletionRequest, stall_s: float | None = 300.0
) -> Completion:
    """Sends ``request`` to the server at ``url`` and reads the stream to its end.

    Raises RequestError, naming the item, for an HTTP error, an error event inside the stream, ``stall_s``
    seconds without a byte (None: the caller has a timeout of its own), a broken or unfinished stream, and an answer
    that contradicts itself.
    """
    body = json.dumps(request.body(model)).encode()
    blocks: list[Block] = []
    begin = time.perf_counter()
    with connection_errors(request.id, url, stall_s):
        async with session.post(
            f"{url}/v1/completions", data=body, headers=_JSON, timeout=_timeout(stall_s)
        ) as response:
            await check_status(response, request.id)
            read = response.content.readany
            while block := await read():
                blocks.append((time.perf_counter(), block))
    return _Stream(request, url, begin).read(blocks)


@cache
def _timeout(stall_s: float | None) -> ClientTimeout:
    import aiohttp

    return aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=stall_s)


@contextmanager
def connection_errors(item: str, url: str, stall_s: float | None) -> Iterator[None]:
    """Turns a silent or broken connection into a RequestError that names the item."""
    import aiohttp

    try:
        yield
    except TimeoutError as error:
        waited = CONNECT_S if stall_s is None else stall_s
        raise RequestError("stalled", f"item {item}: the server at {url} sent nothing for {waited:g} s") from error
    except aiohttp.ClientError as error:
        raise RequestError(
            "connection",
            f"item {item}: the connection to {url} broke: {type(error).__name__}: {error}",
            "see the server's log: it may have died, or run out of memory",
        ) from error


async def check_status(response: ClientResponse, item: str) -> None:
    """Raises RequestError, with the start of the body, for any status but 200."""
    if response.status != 200:
        text = await response.text(errors="replace")
        raise RequestError(
            f"HTTP {response.status}", f"item {item}: HTTP {response.status} from {response.url}: {text[:EXCERPT]}"
        )


class _Stream:
    """The server-sent events of one answer."""

    def __init__(self, request: CompletionRequest, url: str, begin: float) -> None:
        self.request = request
        self.url = url
        self.begin = begin
        self.token_ids: list[int] = []
        self.token_times: list[float] = []
        self.finish_reason: str | None = None
        self.usage: dict[str, Any] | None = None

    def read(self, blocks: Sequence[Block]) -> Completion:
        """The answer. An event came when its last byte came."""
        times: list[float] = []
        events: list[bytes] = []
        left = b""
        for at, block in blocks:
            *lines, left = (left + block).split(b"\n") if left else block.split(b"\n")
            for line in lines:
                if not line.startswith(b"data:"):
                    continue  # empty lines end an event, other fields and comments carry no data
                data = line[5:].strip()
                if data == b"[DONE]":
                    for came, event in zip(times, self._parsed(events), strict=True):
                        self.take(event, came)
                    return self.checked(at - self.begin)
                times.append(at - self.begin)
                events.append(data)
        self._parsed(events)  # an error event tells more than the missing end
        raise self._broken("unfinished", f"the stream from {self.url} ended without [DONE]")

    def _parsed(self, events: Sequence[bytes]) -> list[dict[str, Any]]:
        """The events, all parsed in one call, which takes half the time."""
        found: list[dict[str, Any]]
        try:
            found = json.loads(b"[" + b",".join(events) + b"]")
        except ValueError:
            found = []  # one of them is broken: read one by one, it is named
        if len(found) != len(events):
            found = [self._alone(data) for data in events]
        for event, data in zip(found, events, strict=True):
            if not isinstance(event, dict) or "error" in event or event.get("object") == "error":
                text = data[:EXCERPT].decode(errors="replace")
                raise self._broken("error event", f"error event inside the stream: {text}")
        return found

    def _alone(self, data: bytes) -> Any:
        try:
            return json.loads(data)
        except ValueError as error:
            raise self._broken("bad event", f"an event is not JSON: {data[:EXCERPT]!r}") from error

    def take(self, event: dict[str, Any], at: float) -> None:
        """Adds one event."""
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices") or ():
            ids = choice.get("token_ids")
            if ids is None and choice.get("text"):
                raise self._broken(
                    "no token ids",
                    "the server sends text without token ids (`return_token_ids`)",
                    "use vLLM 0.10.2 or later, or `enginegate serve`: answers are compared by token id",
                )
            prompt = choice.get("prompt_token_ids")
            if prompt is not None and tuple(prompt) != self.request.prompt_token_ids:
                raise self._broken(
                    "prompt changed", "the server changed the prompt's token ids", "look for truncation settings"
                )
            if ids:  # an empty delta is no token
                self.token_times += [at] * len(ids)
                self.token_ids += ids
            self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def checked(self, total_s: float) -> Completion:
        """The answer, if everything that the server says about it fits together."""
        ids, request = self.token_ids, self.request
        stops = [place for place, token in enumerate(ids) if token in request.stop_token_ids]
        if self.usage is None:
            raise self._broken(
                "no usage", "the stream has no usage", "the server must support stream_options.include_usage"
            )
        if self.usage.get("completion_tokens") != len(ids):
            raise self._broken(
                "token count", f"usage says {self.usage.get('completion_tokens')} tokens, the stream has {len(ids)}"
            )
        if self.usage.get("prompt_tokens") != len(request.prompt_token_ids):
            raise self._broken(
                "prompt changed",
                f"the prompt has {len(request.prompt_token_ids)} tokens, usage says {self.usage.get('prompt_tokens')}",
                "look for truncation settings",
            )
        if self.finish_reason == "stop" and stops != [len(ids) - 1]:
            raise self._broken(
                "wrong end",
                f"stopped, but the last of the tokens {ids[-3:]} is not the first of {list(request.stop_token_ids)}",
                "the server has stop tokens of its own: see eos_token_id in generation_config.json",
            )
        if self.finish_reason == "length" and (stops or len(ids) != request.max_tokens):
            raise self._broken(
                "token count", f"finish reason length after {len(ids)} of {request.max_tokens} tokens, stops {stops}"
            )
        if self.finish_reason not in ("stop", "length"):
            raise self._broken("wrong end", f"finish reason {self.finish_reason!r}")
        return Completion(tuple(ids), tuple(self.token_times), total_s, self.finish_reason, self.begin)

    def _broken(self, kind: str, message: str, next_step: str = "see the server's log") -> RequestError:
        return RequestError(kind, f"item {self.request.id}: {message}", next_step)
