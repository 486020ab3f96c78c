"""The JSON of ``/v1/completions``: what a request may say, how an answer grows, how a refusal looks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from itertools import accumulate
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pipeline.engines.scheduler import Scores, Token

PROMPT_CONTEXT = 5  # ids at the prompt's end that the answer's first piece is decoded with


class StreamOptions(BaseModel):
    """``stream_options`` of a request."""

    include_usage: bool = False


class CompletionBody(BaseModel):
    """The body of ``/v1/completions``. Literal types are the parameters that only have one value here.

    ``echo`` with ``logprobs`` asks for the log-probabilities of the prompt's tokens.
    """

    model_config = ConfigDict(extra="ignore", strict=True)

    prompt: list[int] | str | Annotated[list[list[int]], Field(min_length=1, max_length=1)]
    model: str | None = None
    max_tokens: int = Field(default=16, ge=0)
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
    echo: bool | None = None
    stop: str | list[str] | None = None
    logprobs: Literal[0, 1] | None = None
    prompt_logprobs: None = None
    logit_bias: dict[str, float] | None = Field(default=None, max_length=0)
    suffix: None = None

    @property
    def scores(self) -> bool:
        """Whether log-probabilities of the prompt are asked for."""
        return bool(self.echo)

    @property
    def stops(self) -> list[str]:
        """The texts that end an answer."""
        return [text for text in ([self.stop] if isinstance(self.stop, str) else self.stop or []) if text]

    @model_validator(mode="after")
    def _one_of_two_kinds(self) -> CompletionBody:
        if self.scores:
            if self.logprobs is None or self.max_tokens > 1 or self.stream:
                raise ValueError("echo is for scoring a prompt: with logprobs 0 or 1, max_tokens 0 or 1, no stream")
        elif self.logprobs is not None:
            raise ValueError("logprobs are given for prompts only: with echo true, and max_tokens 0 or 1")
        elif self.stops and self.stream:
            raise ValueError("stop: texts end an answer only without stream (stop_token_ids do in both)")
        elif self.max_tokens == 0:
            raise ValueError("max_tokens must be at least 1, but for scoring a prompt with echo and logprobs")
        return self


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


def parse_body(content: bytes) -> CompletionBody:
    """The checked body. Raises Refusal naming the first parameter that is wrong or not supported."""
    try:
        return CompletionBody.model_validate_json(content)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        param = ".".join(map(str, problem["loc"])) or None
        raise Refusal(400, f"{param or 'body'}: {problem['msg']}", param=param) from error


class Reply:
    """One answer as it grows, in OpenAI's form."""

    def __init__(self, body: CompletionBody, prompt: list[int], tokenizer: Any, model: str) -> None:
        self.body = body
        self.prompt = prompt
        self.tokenizer = tokenizer
        self.model = model
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self._text = TextStream(tokenizer, body.skip_special_tokens, prompt)

    def take(self, token: Token) -> str:
        """Adds a token; returns the text that it completes."""
        self.token_ids.append(token.id)
        self.finish_reason = token.finish_reason
        visible = [] if token.finish_reason == "stop" else [token.id]
        return self._text.push(visible, final=token.finish_reason is not None)

    def cut(self) -> bool:
        """Whether a stop text has appeared: the answer ends before the first one, which is not part of it."""
        places = [place for text in self.body.stops if (place := self._text.text.find(text)) >= 0]
        if places:
            self._text.text = self._text.text[: min(places)]
            self.finish_reason = "stop"
        return bool(places)

    def chunk(self, token: Token) -> dict[str, Any]:
        """Adds a token; returns its event."""
        text = self.take(token)
        return self.envelope([self._choice(text, [token.id], first=len(self.token_ids) == 1)])

    def whole(self) -> dict[str, Any]:
        """The answer without streaming."""
        return self.envelope([self._choice(self._text.text, self.token_ids, first=True)], usage=True)

    def scored(self, scores: Scores, stop: frozenset[int]) -> dict[str, Any]:
        """The answer to a scoring request, as vLLM's: the prompt, then the next token if ``max_tokens`` is 1."""
        log_probs = scores.given[1:].tolist()
        if self.body.max_tokens:
            token = scores.best[-1].item()
            log_probs.append(scores.best_log_prob[-1].item())
            self.take(Token(token, "stop" if token in stop else "length"))
        else:
            self.finish_reason = "length"
        texts = [self.tokenizer.decode([token]) for token in (*self.prompt, *self.token_ids)]
        top = [{text: log_prob} for text, log_prob in zip(texts[1:], log_probs, strict=True)]
        if self.body.logprobs:
            best = (self.tokenizer.decode([token]) for token in scores.best.tolist())
            for entry, text, log_prob in zip(top, best, scores.best_log_prob.tolist(), strict=False):
                entry[text] = log_prob
        prompt = "" if self.body.return_token_ids else str(self.tokenizer.decode(self.prompt))
        choice = self._choice(prompt + self._text.text, self.token_ids, first=True)
        choice["logprobs"] = {
            "text_offset": [0, *accumulate(map(len, texts[:-1]))],
            "token_logprobs": [None, *log_probs],
            "tokens": texts,
            "top_logprobs": [None, *top],
        }
        return self.envelope([choice], usage=True)

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


class TextStream:
    """Token ids into text, piece by piece: a piece is held back while it ends inside a character.

    Only the last few ids are decoded again, with one settled piece before them, because a token's text can
    depend on the token before it (a leading space). Before the first piece that is the end of ``prompt``, as in
    vLLM, so both servers answer with the same text.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool, prompt: Sequence[int] = ()) -> None:
        self.text = ""
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._context = 0  # ids before this place are settled and no longer needed
        self._settled = 0  # ids before this place are in ``text``, or the prompt's
        before = list(prompt[-PROMPT_CONTEXT:])
        if before and not self._decode(before).endswith("\N{REPLACEMENT CHARACTER}"):
            self._ids, self._settled = before, len(before)

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
