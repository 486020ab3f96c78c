"""The client against scripted servers: times, order, and every way in which an answer can be wrong."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from pipeline.errors import DataError, ServerError
from pipeline.records import Item, Record, Timing
from pipeline.serving.client import ask
from tests.unit.serving.fake_engine import EOS, ByteTokenizer
from tests.unit.serving.mock_server import DONE, Script, chunk, scripted, usage

PROMPT = (7, 8, 9)
HOLA = list(b"Hola")
GOOD: Script = [chunk(HOLA[:2], "Ho"), chunk(HOLA[2:], "la"), chunk([EOS], "", "stop"), usage(3, 5), DONE]


def items(count: int = 1) -> list[Item]:
    return [Item(f"item-{number}", "source", "reference", PROMPT) for number in range(count)]


def ask_script(
    script: Script, *, count: int = 1, status: int = 200, **options: Any
) -> tuple[list[Record], list[Timing]]:
    with scripted(lambda _body: script, status) as (url, _):
        return ask_url(url, items(count), **options)


def ask_url(url: str, asked: list[Item], **options: Any) -> tuple[list[Record], list[Timing]]:
    settings: dict[str, Any] = {
        "tokenizer": ByteTokenizer(),
        "max_new_tokens": 10,
        "max_tokens": 100,
        "stop_token_ids": [EOS],
        "concurrency": 4,
        "order_seed": 1,
    }
    return ask(asked, url, "mock", **(settings | options))


def test_a_good_answer() -> None:
    records, timings = ask_script(GOOD)
    assert records == [Record("item-0", PROMPT, tuple(HOLA), "Hola", "stop")]
    assert timings[0].output_tokens == 5  # the stop token was generated too


def test_an_answer_that_ends_by_length_keeps_its_last_token() -> None:
    records, _ = ask_script([chunk(HOLA, "Hola", "length"), usage(3, 4), DONE], max_new_tokens=4)
    assert records[0].output_token_ids == tuple(HOLA)
    assert records[0].finish_reason == "length"


def test_the_end_token_alone_is_an_empty_answer() -> None:
    records, timings = ask_script([chunk([EOS], "", "stop"), usage(3, 1), DONE])
    assert records[0].text == ""
    assert records[0].output_token_ids == ()
    assert timings[0].output_tokens == 1


def test_the_request_says_everything_that_greedy_needs() -> None:
    with scripted(lambda _body: GOOD) as (url, seen):
        ask_url(url, items())
    assert seen[0] == {
        "model": "mock",
        "prompt": list(PROMPT),
        "max_tokens": 10,
        "n": 1,
        "temperature": 0,
        "seed": 0,
        "stop_token_ids": [EOS],
        "ignore_eos": False,
        "skip_special_tokens": True,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_known_times() -> None:
    """An empty delta at 5 ms is no token; the first two tokens come together at 50 ms, the last at 80 ms."""
    script: Script = [0.005, chunk([], ""), 0.045, chunk(HOLA[:2], "Ho"), 0.03, chunk([EOS], "", "stop"), usage(3, 3)]
    _, timings = ask_script([*script, DONE])
    first = timings[0].first_token_s
    assert first is not None
    assert 0.049 <= first < 0.4  # the upper bounds leave room for a busy machine
    assert 0.029 <= timings[0].total_s - first < 0.4
    assert timings[0].output_tokens == 3


def test_events_cut_anywhere_and_windows_line_ends() -> None:
    whole = b"".join(_bytes(step) for step in GOOD).replace(b"\n", b"\r\n")
    pieces: Script = [b": a comment\r\n\r\n"]
    for start in range(0, len(whole), 40):
        pieces += [whole[start : start + 40], 0.001]
    assert ask_script(pieces)[0][0].text == "Hola"


def _bytes(step: Any) -> bytes:
    import json

    return step if isinstance(step, bytes) else f"data: {json.dumps(step)}\n\n".encode()


@pytest.mark.parametrize(
    ("script", "named"),
    [
        ([chunk(HOLA[:1], "H"), {"error": {"message": "out of memory", "code": 500}}, DONE], "out of memory"),
        ([{"object": "error", "message": "bad"}, DONE], "error event"),
        ([chunk([*HOLA, EOS], "Hola", "stop"), DONE], "no usage"),
        ([chunk([*HOLA, EOS], "Hola", "stop"), usage(3, 4), DONE], "usage says 4 tokens, the stream has 5"),
        ([chunk([*HOLA, EOS], "Hola", "stop"), usage(2, 5), DONE], "usage says 2"),
        ([chunk(None, "Hola", "stop"), usage(3, 5), DONE], "without token ids"),
        ([chunk([*HOLA, EOS], "Hola", "stop", prompt_token_ids=[7, 8]), usage(3, 5), DONE], "changed the prompt"),
        ([chunk(HOLA, "Hola", "stop"), usage(3, 4), DONE], "stop tokens of its own"),
        ([chunk([EOS, *HOLA, EOS], "Hola", "stop"), usage(3, 6), DONE], "is not the first"),
        ([chunk(HOLA, "Hola", "length"), usage(3, 4), DONE], "length after 4 of 10"),
        ([chunk(HOLA, "Hola", "abort"), usage(3, 4), DONE], "abort"),
        ([chunk(HOLA, "Hola"), usage(3, 4), DONE], "finish reason None"),
        ([usage(3, 0), DONE], "finish reason None"),
        ([chunk([*HOLA, EOS], "Hola", "stop"), usage(3, 5)], "ended without [DONE]"),
        ([b"data: {oops\n\n"], "not JSON"),
        ([chunk(HOLA[:1], "H"), None], "broke"),
        ([chunk(HOLA[:1], "H"), 2.0], "sent nothing for 0.3 s"),
    ],
)
def test_each_fault_is_an_error_that_names_the_item(script: Script, named: str) -> None:
    with pytest.raises(ServerError, match="item item-0") as raised:
        ask_script(script, stall_s=0.3)
    assert named in str(raised.value)
    assert raised.value.next_step


def test_an_http_error_shows_status_and_body() -> None:
    with pytest.raises(ServerError, match="item item-0: HTTP 503 .*no room"):
        ask_script([], status=503)


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(ServerError, match="item item-0: the connection"):
        ask_url("http://127.0.0.1:9", items())


def test_an_item_that_does_not_fit_is_refused_before_anything_is_sent() -> None:
    with scripted(lambda _body: GOOD) as (url, seen), pytest.raises(DataError, match="item item-0: 3 prompt tokens"):
        ask_url(url, items(), max_tokens=12)
    assert seen == []


def test_the_first_failure_ends_the_run() -> None:
    asked: list[int] = []

    def script(body: dict[str, Any]) -> Script:
        asked.append(body["prompt"][0])
        return [{"error": {"message": "broken"}}] if len(asked) == 5 else [0.01, *GOOD]

    with scripted(script) as (url, _), pytest.raises(ServerError, match="broken"):
        ask_url(url, items(200))
    assert len(asked) < 50


def test_order_depends_on_the_seed_and_results_do_not() -> None:
    many = [Item(f"item-{number}", "", "", (number + 1,)) for number in range(30)]
    orders = []
    for seed in (1, 1, 2):
        with scripted(lambda body: [chunk([body["prompt"][0], EOS], "", "stop"), usage(1, 2), DONE]) as (url, seen):
            records, timings = ask_url(url, many, order_seed=seed, concurrency=1)
        orders.append([body["prompt"][0] for body in seen])
        assert [record.id for record in records] == [timing.id for timing in timings] == [item.id for item in many]
        assert [record.output_token_ids for record in records] == [item.prompt_token_ids for item in many]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2]) == list(range(1, 31))


def test_concurrency_is_kept() -> None:
    lock = threading.Lock()
    running, most = 0, 0

    class Counted(list[Any]):
        def __iter__(self) -> Any:
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            yield 0.02
            yield from GOOD[:-1]
            with lock:
                running -= 1
            yield DONE

    with scripted(lambda _body: Counted()) as (url, _):
        ask_url(url, items(30), concurrency=5)
    assert most == 5
