"""The server over real HTTP on 127.0.0.1, with a fake executor behind it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import ClientSession, web

from pipeline.engines.scheduler import Scheduler
from pipeline.engines.server import build_app
from tests.unit.serving.fake_engine import EOS, ByteTokenizer, FakeExecutor, ScoringExecutor, continuation, next_token

PROMPT = [11, 22, 33]
STOPS = frozenset({EOS})


@asynccontextmanager
async def serving(executor: FakeExecutor) -> AsyncIterator[tuple[ClientSession, str]]:
    app = build_app(Scheduler(executor), ByteTokenizer(), "toy", STOPS)
    runner = web.AppRunner(app, shutdown_timeout=5.0, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    async with ClientSession() as session:
        yield session, f"http://127.0.0.1:{port}"
    await runner.cleanup()


def with_server(test: Callable[[ClientSession, str], Awaitable[Any]], executor: FakeExecutor | None = None) -> Any:
    async def run() -> Any:
        async with serving(executor or FakeExecutor()) as (session, url):
            return await test(session, url)

    return asyncio.run(run())


async def post(session: ClientSession, url: str, **body: Any) -> tuple[int, Any]:
    async with session.post(f"{url}/v1/completions", json=body) as response:
        text = await response.text()
        if response.content_type == "text/event-stream":
            return response.status, [event.removeprefix("data: ") for event in text.strip().split("\n\n")]
        return response.status, json.loads(text)


def test_a_whole_answer() -> None:
    async def test(session: ClientSession, url: str) -> Any:
        return await post(session, url, prompt=PROMPT, max_tokens=40, return_token_ids=True, temperature=0)

    status, reply = with_server(test)
    tokens, reason = continuation(PROMPT, 40, STOPS)
    choice = reply["choices"][0]
    assert status == 200
    assert choice["token_ids"] == tokens
    assert choice["prompt_token_ids"] == PROMPT
    assert choice["finish_reason"] == reason
    total = len(PROMPT) + len(tokens)
    assert reply["usage"] == {"prompt_tokens": 3, "completion_tokens": len(tokens), "total_tokens": total}
    assert reply["model"] == "toy"


def test_a_streamed_answer_has_the_same_tokens_and_text() -> None:
    async def test(session: ClientSession, url: str) -> Any:
        body = {"prompt": "año", "max_tokens": 30, "return_token_ids": True}
        options = {"stream": True, "stream_options": {"include_usage": True}}
        return (await post(session, url, **body))[1], (await post(session, url, **body, **options))[1]

    whole, events = with_server(test)
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert [token for choice in choices for token in choice["token_ids"]] == whole["choices"][0]["token_ids"]
    assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    assert choices[0]["prompt_token_ids"] == list("año".encode())
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]


def test_ignore_eos_and_stop_token_ids() -> None:
    long, _ = continuation(PROMPT, 60, frozenset())
    stop = long[5]

    async def test(session: ClientSession, url: str) -> Any:
        body = {"prompt": PROMPT, "max_tokens": 60, "ignore_eos": True, "return_token_ids": True}
        return (await post(session, url, **body))[1], (await post(session, url, **body, stop_token_ids=[stop]))[1]

    ignored, stopped = with_server(test)
    assert ignored["choices"][0]["token_ids"] == long
    assert ignored["choices"][0]["finish_reason"] == "length"
    assert stopped["choices"][0]["token_ids"] == long[: long.index(stop) + 1]
    assert stopped["choices"][0]["finish_reason"] == "stop"


def test_many_requests_at_once_give_what_each_gives_alone() -> None:
    prompts = [[number + 1, *range(1, 2 + number % 7)] for number in range(40)]
    executor = FakeExecutor(max_batch=8)

    async def test(session: ClientSession, url: str) -> Any:
        asked = (post(session, url, prompt=prompt, max_tokens=25, return_token_ids=True) for prompt in prompts)
        return [reply["choices"][0]["token_ids"] for _, reply in await asyncio.gather(*asked)]

    assert with_server(test, executor) == [continuation(prompt, 25, STOPS)[0] for prompt in prompts]
    assert max(len(batch) for batch in executor.batches) == 8  # they did share batches


@pytest.mark.parametrize(
    ("change", "status", "named"),
    [
        ({"temperature": 0.7}, 400, "temperature"),
        ({"n": 2}, 400, "n"),
        ({"logprobs": 1}, 400, "logprobs"),
        ({"stop": ["\n"], "stream": True}, 400, "stop"),
        ({"echo": True}, 400, "echo"),
        ({"min_tokens": 3}, 400, "min_tokens"),
        ({"repetition_penalty": 1.1}, 400, "repetition_penalty"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"echo": True, "logprobs": 1}, 400, "echo"),  # max_tokens 4
        ({"echo": True, "logprobs": 5, "max_tokens": 0}, 400, "logprobs"),
        ({"echo": True, "logprobs": 0, "max_tokens": 0, "stream": True}, 400, "echo"),
        ({"echo": True, "logprobs": 0, "max_tokens": 0}, 400, "gives no log-probabilities"),  # cannot score
        ({"echo": True, "max_tokens": 0}, 400, "logprobs"),
        ({"max_tokens": 126}, 400, "limit of 128"),
        ({"prompt": []}, 400, "empty"),
        ({"prompt": [1, 256]}, 400, "256"),
        ({"prompt": [[1], [2]]}, 400, "prompt"),
        ({"prompt": None}, 400, "prompt"),
        ({"model": "other"}, 404, "other"),
    ],
)
def test_what_is_refused(change: dict[str, Any], status: int, named: str) -> None:
    async def test(session: ClientSession, url: str) -> Any:
        return await post(session, url, **{"prompt": PROMPT, "max_tokens": 4, **change})

    found, reply = with_server(test)
    assert found == status
    assert named in reply["error"]["message"]
    assert reply["error"]["code"] == status


def test_a_stop_text_ends_the_answer_before_itself() -> None:
    """It is searched in the text, so it may begin in one token and end in another: here each is one byte."""
    tokens, _ = continuation([3], 60, frozenset())
    assert bytes(tokens[:4]) == b"73i+"

    async def test(session: ClientSession, url: str) -> Any:
        body = {"prompt": [[3]], "max_tokens": 60, "ignore_eos": True, "return_token_ids": True}
        return await post(session, url, **body, stop=["never there", "i+"])

    _, reply = with_server(test)
    choice = reply["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("73", "stop")
    assert choice["token_ids"] == tokens[:4]
    assert reply["usage"]["completion_tokens"] == 4


def test_a_prompt_is_scored() -> None:
    async def test(session: ClientSession, url: str) -> Any:
        body = {"prompt": [65, 66, 67], "echo": True, "temperature": 0, "seed": 1}
        return [
            await post(session, url, **body, max_tokens=0, logprobs=0, return_token_ids=True),
            await post(session, url, **body, max_tokens=1, logprobs=1),
        ]

    (status, plain), (_, following) = with_server(test, ScoringExecutor())
    choice = plain["choices"][0]
    assert status == 200
    assert choice["logprobs"]["token_logprobs"] == [None, pytest.approx(-0.66), pytest.approx(-0.67)]
    assert choice["logprobs"]["tokens"] == ["A", "B", "C"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]
    assert choice["logprobs"]["top_logprobs"] == [None, {"B": pytest.approx(-0.66)}, {"C": pytest.approx(-0.67)}]
    assert (choice["text"], choice["prompt_token_ids"], choice["token_ids"]) == ("", [65, 66, 67], [])
    assert plain["usage"] == {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3}

    choice = following["choices"][0]
    decode, token = ByteTokenizer().decode, next_token([65, 66, 67])
    assert choice["text"] == "ABC" + decode([token])
    assert choice["logprobs"]["token_logprobs"] == [None, *(pytest.approx(-one / 100) for one in (66, 67, token))]
    likely = decode([next_token([65])])
    assert choice["logprobs"]["top_logprobs"][1] == {
        "B": pytest.approx(-0.66),
        likely: pytest.approx(-next_token([65]) / 100),
    }
    assert len(choice["logprobs"]["top_logprobs"]) == 4
    assert following["usage"]["completion_tokens"] == 1


def test_a_failure_while_scoring_is_a_500() -> None:
    executor = ScoringExecutor()
    executor.fail_at = 0

    async def test(session: ClientSession, url: str) -> Any:
        return await post(session, url, prompt=PROMPT, max_tokens=0, echo=True, logprobs=0)

    status, reply = with_server(test, executor)
    assert status == 500
    assert "out of memory" in reply["error"]["message"]


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[]", b""])
def test_malformed_json_is_a_400(content: bytes) -> None:
    async def test(session: ClientSession, url: str) -> Any:
        async with session.post(f"{url}/v1/completions", data=content) as response:
            return response.status, await response.json()

    status, reply = with_server(test)
    assert status == 400
    assert reply["error"]["type"] == "BadRequestError"


def test_parameters_without_effect_on_greedy_decoding_are_accepted() -> None:
    async def test(session: ClientSession, url: str) -> Any:
        return await post(session, url, prompt=PROMPT, max_tokens=2, top_p=0.9, top_k=5, seed=3, user="me", stop=[])

    assert with_server(test)[0] == 200


def test_models_version_health_and_unknown_paths() -> None:
    async def test(session: ClientSession, url: str) -> Any:
        replies = []
        for path in ("/health", "/v1/models", "/version", "/v1/nothing"):
            async with session.get(url + path) as response:
                replies.append((response.status, await response.text()))
        return replies

    health, models, version, unknown = with_server(test)
    assert health == (200, "")
    assert json.loads(models[1])["data"][0] == {
        "id": "toy",
        "object": "model",
        "owned_by": "enginegate",
        "max_model_len": 128,
    }
    assert json.loads(version[1])["version"]
    assert unknown[0] == 404
    assert "/v1/nothing" in json.loads(unknown[1])["error"]["message"]


@pytest.mark.parametrize("trouble", ["fail_at", "nan_at"])
def test_an_engine_failure_reaches_clients_and_health(trouble: str) -> None:
    executor = FakeExecutor()
    setattr(executor, trouble, 2)
    reason = "out of memory" if trouble == "fail_at" else "not finite"
    body = {"prompt": PROMPT, "max_tokens": 50, "ignore_eos": True}

    async def test(session: ClientSession, url: str) -> Any:
        streamed, events = await post(session, url, **body, stream=True)
        later, refused = await post(session, url, **body)
        async with session.get(f"{url}/health") as response:
            return streamed, events, later, refused, response.status, await response.text()

    streamed, events, later, refused, health, why = with_server(test, executor)
    assert streamed == 200  # the status line had gone out
    assert events[-1] == "[DONE]"
    assert reason in json.loads(events[-2])["error"]["message"]
    assert (later, health) == (503, 503)
    assert reason in refused["error"]["message"]
    assert reason in why


def test_an_engine_failure_is_a_500_without_streaming() -> None:
    executor = FakeExecutor()
    executor.fail_at = 1

    async def test(session: ClientSession, url: str) -> Any:
        return await post(session, url, prompt=PROMPT, max_tokens=50, ignore_eos=True)

    status, reply = with_server(test, executor)
    assert status == 500
    assert "out of memory" in reply["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_row(stream: bool) -> None:
    executor = FakeExecutor(max_batch=1, max_tokens=10_000, step_s=0.01)

    async def test(session: ClientSession, url: str) -> Any:
        body = {"prompt": PROMPT, "max_tokens": 5000, "ignore_eos": True, "stream": stream}
        asked = asyncio.create_task(session.post(f"{url}/v1/completions", json=body))
        await asyncio.sleep(0.2)
        if stream:
            (await asked).close()
        else:
            asked.cancel()
        return await asyncio.wait_for(post(session, url, prompt=PROMPT, max_tokens=3), timeout=5)

    assert with_server(test, executor)[0] == 200
    assert executor.steps < 500


def test_stopping_finishes_what_runs_and_refuses_what_waits() -> None:
    executor = FakeExecutor(max_batch=1, step_s=0.02)
    body = {"max_tokens": 20, "ignore_eos": True, "return_token_ids": True}

    async def run() -> Any:
        async with ClientSession() as session:
            async with serving(executor) as (_, url):
                first = asyncio.create_task(post(session, url, prompt=PROMPT, **body))
                await asyncio.sleep(0.1)
                second = asyncio.create_task(post(session, url, prompt=[5], **body))
                await asyncio.sleep(0.1)
            return await first, await second

    (status, reply), (refused, error) = asyncio.run(run())
    assert status == 200
    assert len(reply["choices"][0]["token_ids"]) == 20
    assert refused == 500
    assert "stopping" in error["error"]["message"]
