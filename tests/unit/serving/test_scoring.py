"""Which references are scored, what is sent, and every way in which the reply can be wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipeline.errors import ServerError
from pipeline.records import Item, Score
from pipeline.serving.scoring import Forced, chosen, score
from tests.unit.serving.fake_engine import ByteTokenizer
from tests.unit.serving.mock_server import scripted

FORCED = Forced("item-0", (7, 8), (9, 10))


def reply(log_probs: Any, read: Any = (7, 8, 9, 10)) -> bytes:
    return json.dumps({"choices": [{"logprobs": {"token_logprobs": log_probs}, "prompt_token_ids": read}]}).encode()


def ask(content: bytes, status: int = 200) -> list[Score]:
    with scripted(lambda _body: [content], status) as (url, _):
        return score([FORCED], url, "mock", concurrency=2, order_seed=1)


def test_only_the_reference_is_kept() -> None:
    assert ask(reply([None, -1.0, -0.5, -0.25])) == [Score("item-0", (-0.5, -0.25))]


def test_the_request() -> None:
    with scripted(lambda _body: [reply([None, -1, -0.5, -0.25])]) as (url, seen):
        score([FORCED], url, "mock", concurrency=2, order_seed=1)
    assert seen == [
        {
            "model": "mock",
            "prompt": [7, 8, 9, 10],
            "max_tokens": 0,
            "echo": True,
            "logprobs": 0,
            "temperature": 0,
            "return_token_ids": True,
        }
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (reply([None, -1.0, -0.5]), "4 tokens were sent, 4 read and 3 scored"),
        (reply([None, -1.0, -0.5, -0.25], [7, 8, 9]), "4 tokens were sent, 3 read"),
        (reply([None, -1.0, -0.5, None]), "no finite numbers"),
        (reply([None, -1.0, float("nan"), -0.5]), "no finite numbers"),
        (b'{"choices": [{"logprobs": null}]}', "no log-probabilities"),
        (b"<html>", "no log-probabilities"),
    ],
)
def test_wrong_replies(content: bytes, message: str) -> None:
    with pytest.raises(ServerError, match=f"item item-0: .*{message}"):
        ask(content)


def test_a_refusal_and_a_broken_connection() -> None:
    with pytest.raises(ServerError, match="item item-0: HTTP 400.*no room"):
        ask(b"", status=400)
    with scripted(lambda _body: [None]) as (url, _), pytest.raises(ServerError, match="item-0: the connection"):
        score([FORCED], url, "mock", concurrency=2, order_seed=1)


def test_the_choice_depends_on_ids_alone() -> None:
    items = [Item(f"item-{number}", "s", "Hola", (1, 2)) for number in range(20)]
    forced = chosen(items, 5, ByteTokenizer(), max_tokens=100)
    assert forced == chosen(items[::-1], 5, ByteTokenizer(), max_tokens=100)
    assert [one.id for one in forced] == sorted({one.id for one in forced})
    assert len(forced) == 5
    assert forced[0].reference_token_ids == tuple(b"Hola")
    assert {one.id for one in forced} <= {one.id for one in chosen(items, 6, ByteTokenizer(), max_tokens=100)}


def test_what_has_no_tokens_or_does_not_fit_is_left_out() -> None:
    items = [Item("a", "s", "Hola", (1, 2)), Item("b", "s", "", (1,)), Item("c", "s", "Hol", (1, 2))]
    assert [one.id for one in chosen(items, 9, ByteTokenizer(), max_tokens=7)] == ["a", "c"]
    assert [one.id for one in chosen(items, 9, ByteTokenizer(), max_tokens=6)] == ["c"]
    assert chosen(items, 0, ByteTokenizer(), max_tokens=100) == []


def test_nothing_to_score_asks_nobody() -> None:
    assert score([], "http://127.0.0.1:9", "mock", concurrency=2, order_seed=1) == []
