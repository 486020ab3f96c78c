"""Asks one server every item of the evaluation set. All arms are asked by this code, so none is favoured."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from pipeline.errors import DataError, ServerError
from pipeline.records import Item, Record, Timing
from pipeline.serving.completion import Completion, CompletionRequest, complete
from pipeline.serving.dialects import Dialect

if TYPE_CHECKING:
    from aiohttp import ClientSession


class Named(Protocol):
    """A request, which has an item id."""

    @property
    def id(self) -> str:
        """The item's id."""
        ...


Request = TypeVar("Request", bound=Named)
Answer = TypeVar("Answer")


def ask(
    items: Sequence[Item],
    url: str | Sequence[str],
    model: str,
    *,
    tokenizer: Any,
    max_new_tokens: int,
    max_tokens: int,
    stop_token_ids: Sequence[int],
    concurrency: int,
    order_seed: int,
    label: str = "asking",
    stall_s: float = 300.0,
    dialect: Dialect = "vllm",
) -> tuple[list[Record], list[Timing]]:
    """The greedy answer to each item and how long it took, in the order of ``items``.

    Items are sent in an order shuffled by ``order_seed``, at most ``concurrency`` at a time, to the servers at
    ``url`` (one, or several in turn). Answers are token
    ids without the stop token (``finish_reason`` says ``stop``) and are decoded here with the checkpoint's
    ``tokenizer``, so every arm's text is made by the same code. ``Timing.output_tokens`` counts what was
    generated, the stop token included.

    Raises DataError for an item that needs more than ``max_tokens`` (prompt and answer together), before
    anything is sent, and ServerError, naming the item, for the first request that fails.
    """
    from tqdm import tqdm

    refuse_too_long(items, max_new_tokens, max_tokens)
    requests = [
        CompletionRequest(item.id, item.prompt_token_ids, max_new_tokens, tuple(stop_token_ids), dialect=dialect)
        for item in items
    ]
    random.Random(order_seed).shuffle(requests)
    turns = in_turn(url)
    with tqdm(total=len(requests), desc=label, unit="item", mininterval=5) as progress:

        def send(session: ClientSession, request: CompletionRequest) -> Awaitable[Completion]:
            return complete(session, next(turns), model, request, stall_s)

        answers = asyncio.run(send_all(requests, send, concurrency, progress.update))
    records = [_record(item, answers[item.id], tokenizer) for item in items]
    timings = [_timing(item, answers[item.id]) for item in items]
    return records, timings


def in_turn(url: str | Sequence[str]) -> Iterator[str]:
    """The server for each next request: one URL for ever, or several in turn."""
    return itertools.cycle([url] if isinstance(url, str) else url)


def refuse_too_long(items: Iterable[Item], max_new_tokens: int, max_tokens: int) -> None:
    """Raises DataError for the first item that needs more than ``max_tokens``: nothing is ever cut."""
    for item in items:
        prompt = len(item.prompt_token_ids)
        if prompt + max_new_tokens > max_tokens:
            raise DataError(
                f"item {item.id}: {prompt} prompt tokens and {max_new_tokens} new ones exceed the limit {max_tokens}",
                "raise engine.max_tokens, or lower eval.max_new_tokens or eval.max_words, in params.yaml",
            )


async def send_all(
    requests: Sequence[Request],
    send: Callable[[ClientSession, Request], Awaitable[Answer]],
    concurrency: int,
    progress: Callable[[], object],
) -> dict[str, Answer]:
    """Every request's answer by id, in the given order and at most ``concurrency`` at a time.

    The first failure cancels the rest and is raised.
    """
    import aiohttp

    answers: dict[str, Answer] = {}
    waiting = iter(requests)

    async def work(session: ClientSession) -> None:
        for request in waiting:  # one iterator for all workers, so the order of sending is kept
            answers[request.id] = await send(session, request)
            progress()

    connector = aiohttp.TCPConnector(limit=concurrency)
    try:
        async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(requests))):
                group.create_task(work(session))
    except* ServerError as failed:
        raise failed.exceptions[0] from None
    return answers


def _record(item: Item, answer: Completion, tokenizer: Any) -> Record:
    ids = answer.answer_token_ids
    return Record(
        id=item.id,
        prompt_token_ids=item.prompt_token_ids,
        output_token_ids=ids,
        text=tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False),
        finish_reason=answer.finish_reason,
    )


def _timing(item: Item, answer: Completion) -> Timing:
    return Timing(item.id, answer.token_times[0], answer.total_s, len(answer.token_ids))
