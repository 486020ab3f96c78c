"""Asks one server how likely given answers are: the log-probability of each token of the references.

All arms score the same tokens (an item's prompt, then its reference answer), which are known before any arm runs, so
the numbers of two arms are paired by token. On the wire this is a completion that generates nothing: ``echo`` with
``logprobs`` and ``max_tokens`` 0, as vLLM and our own server have it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import random
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.errors import ServerError
from pipeline.records import Item, Score
from pipeline.serving.client import in_turn, send_all
from pipeline.serving.completion import EXCERPT, check_status, connection_errors

if TYPE_CHECKING:
    from aiohttp import ClientSession


@dataclass(frozen=True)
class Forced:
    """The tokens of one item that are to be scored, and those before them."""

    id: str
    prompt_token_ids: tuple[int, ...]
    reference_token_ids: tuple[int, ...]

    def body(self, model: str) -> dict[str, Any]:
        """The JSON body."""
        return {
            "model": model,
            "prompt": [*self.prompt_token_ids, *self.reference_token_ids],
            "max_tokens": 0,
            "echo": True,
            "logprobs": 0,
            "temperature": 0,
            "return_token_ids": True,
        }


def chosen(items: Sequence[Item], count: int, tokenizer: Any, max_tokens: int) -> list[Forced]:
    """The first ``count`` items in an order that depends on ids alone, which mixes groups and lengths.

    Items whose reference has no tokens, or does not fit into ``max_tokens`` together with its prompt, are left
    out: every arm with this limit leaves out the same ones. vLLM wants room for one token more.
    """
    forced: list[Forced] = []
    for item in sorted(items, key=lambda item: hashlib.sha256(item.id.encode()).digest()):
        if len(forced) == count:
            break
        reference = tuple(tokenizer(item.reference, add_special_tokens=False)["input_ids"])
        if reference and len(item.prompt_token_ids) + len(reference) < max_tokens:
            forced.append(Forced(item.id, item.prompt_token_ids, reference))
    return sorted(forced, key=lambda one: one.id)


def score(
    forced: Sequence[Forced],
    url: str | Sequence[str],
    model: str,
    *,
    concurrency: int,
    order_seed: int,
    label: str = "scoring",
    stall_s: float = 300.0,
) -> list[Score]:
    """The log-probabilities (nats) of each item's reference tokens, in the order of ``forced``.

    Sent in an order shuffled by ``order_seed``, at most ``concurrency`` at a time, to the servers at ``url`` (one,
    or several in turn). Raises ServerError, naming
    the item, for the first request that fails.
    """
    from tqdm import tqdm

    if not forced:
        return []
    requests = list(forced)
    random.Random(order_seed).shuffle(requests)
    turns = in_turn(url)
    with tqdm(total=len(requests), desc=label, unit="item", mininterval=5) as progress:

        def send(session: ClientSession, request: Forced) -> Awaitable[tuple[float, ...]]:
            return _score(session, next(turns), model, request, stall_s)

        found = asyncio.run(send_all(requests, send, concurrency, progress.update))
    return [Score(one.id, found[one.id]) for one in forced]


async def _score(session: ClientSession, url: str, model: str, forced: Forced, stall_s: float) -> tuple[float, ...]:
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=stall_s)
    with connection_errors(forced.id, url, stall_s):
        async with session.post(f"{url}/v1/completions", json=forced.body(model), timeout=timeout) as response:
            await check_status(response, forced.id)
            text = await response.text(errors="replace")
    return _checked(text, forced)


def _checked(text: str, forced: Forced) -> tuple[float, ...]:
    """The reference's log-probabilities, if the reply is one number for each token that was sent."""
    tokens = [*forced.prompt_token_ids, *forced.reference_token_ids]
    try:
        choice = json.loads(text)["choices"][0]
        given, read = choice["logprobs"]["token_logprobs"], choice["prompt_token_ids"]
    except (ValueError, LookupError, TypeError) as error:
        raise ServerError(
            f"item {forced.id}: no log-probabilities of the prompt in the reply: {text[:EXCERPT]}",
            "the server must support echo with logprobs (vLLM, `enginegate serve`); or set eval.scored to 0",
        ) from error
    if read != tokens or len(given) != len(tokens):
        raise ServerError(
            f"item {forced.id}: {len(tokens)} tokens were sent, {len(read or ())} read and {len(given)} scored",
            "look for truncation settings",
        )
    log_probs = given[len(forced.prompt_token_ids) :]
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in log_probs):
        raise ServerError(f"item {forced.id}: log-probabilities that are no finite numbers: {log_probs[:5]}")
    return tuple(map(float, log_probs))
