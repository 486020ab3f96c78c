"""Prompt logs: every form in which gateways write requests, and lines that are no request."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.promptlog import BadLineError, PromptLog, log_files, parse_line, request_text
from pipeline.data.rows import Request
from pipeline.errors import DataError, InputError

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "temperature": 0}
MESSAGE = {"role": "assistant", "content": "hi"}
HI = {"choices": [{"index": 0, "message": MESSAGE, "finish_reason": "stop"}], "usage": {}}
USER = ({"role": "user", "content": "hello"},)


def _parse(entry: Any) -> list[Request]:
    return parse_line(json.dumps(entry).encode())


@pytest.mark.parametrize(
    "entry",
    [
        CHAT | HI,
        {"request": CHAT, "response": HI},
        {"request": json.dumps(CHAT), "response": HI},
        {"request": CHAT} | HI,
        {"custom_id": "7", "method": "POST", "url": "/v1/chat/completions", "body": CHAT} | HI,
        {"request": {"body": CHAT}, "response": {"status_code": 200, "body": HI}},
    ],
)
def test_a_chat_with_its_answer_in_every_wrapping(entry: dict[str, Any]) -> None:
    assert _parse(entry) == [Request(messages=USER, answer=MESSAGE)]


@pytest.mark.parametrize(
    "entry",
    [
        CHAT,
        {"request": CHAT, "response": None},
        {"request": CHAT, "response": {"error": {"message": "overloaded"}}},
        {"request": CHAT, "response": {"status_code": 500, "body": {"error": "x"}}},
        {"request": CHAT, "response": {"choices": []}},
        {"request": CHAT, "response": {"choices": [{"message": {"role": "assistant", "content": None}}]}},
        {"request": CHAT, "response": ""},
    ],
)
def test_a_chat_without_an_answer(entry: dict[str, Any]) -> None:
    assert _parse(entry) == [Request(messages=USER)]


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"prompt": "a b"}, [Request(prompt="a b")]),
        ({"prompt": "a b", "choices": [{"text": " c"}]}, [Request(prompt="a b", answer=" c")]),
        ({"request": {"prompt": "a b"}, "response": " c"}, [Request(prompt="a b", answer=" c")]),
        ({"prompt": [5, 6]}, [Request(prompt=(5, 6))]),
        ({"prompt": [[5, 6], [7]]}, [Request(prompt=(5, 6)), Request(prompt=(7,))]),
        (
            {"prompt": ["a", "b"], "choices": [{"index": 1, "text": "2"}, {"index": 0, "text": "1"}]},
            [Request(prompt="a", answer="1"), Request(prompt="b", answer="2")],
        ),
        # Two choices for each prompt: the first of each is taken.
        (
            {"prompt": ["a", "b"], "n": 2, "choices": [{"index": place, "text": str(place)} for place in range(4)]},
            [Request(prompt="a", answer="0"), Request(prompt="b", answer="2")],
        ),
    ],
)
def test_completions(entry: dict[str, Any], expected: list[Request]) -> None:
    assert _parse(entry) == expected


def test_tools_and_turns_are_kept_in_the_form_of_templates() -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": "the weather?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "4 degrees"},
    ]
    (found,) = _parse({"messages": messages, "tools": tools})
    assert found.tools == tuple(tools)
    assert [message["role"] for message in found.messages] == ["system", "user", "assistant", "tool"]
    assert found.messages[1]["content"] == "What is\nthe weather?"
    assert found.messages[2]["content"] == ""
    assert found.messages[2]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Oslo"}}
    assert found.messages[3]["tool_call_id"] == "c1"
    calls = '[{"function": {"arguments": {"city": "Oslo"}, "name": "weather"}, "id": "c1", "type": "function"}]'
    assert request_text(found) == (
        f"system: Be brief.\nuser: What is\nthe weather?\nassistant: {calls}\ntool: 4 degrees"
    )


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{broken", "not JSON"),
        (b"\xff\xfe{}", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[1]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b'{"request": 3}', "not a JSON object"),
        (b'{"request": "{"}', "request is not JSON"),
        (b'{"model": "m"}', "neither messages nor prompt"),
        (b'{"messages": []}', "messages are not a list of messages"),
        (b'{"messages": "hello"}', "messages are not a list of messages"),
        (b'{"messages": ["hello"]}', "a message without a known role"),
        (b'{"messages": [{"role": "robot", "content": "x"}]}', "a message without a known role"),
        (b'{"messages": [{"role": "user", "content": ""}]}', "a message without content"),
        (b'{"messages": [{"role": "user", "content": 3}]}', "content is neither text nor parts"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "content of type image_url"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "half of a surrogate pair"),
        (b'{"messages": [{"role": "assistant", "tool_calls": [{}]}]}', "a tool call without a function"),
        (b'{"messages": [{"role": "user", "content": "x"}], "tools": "f"}', "tools are not a list"),
        (b'{"prompt": ""}', "prompt is neither text nor token ids"),
        (b'{"prompt": []}', "prompt is neither text nor token ids"),
        (b'{"prompt": [1, "a"]}', "prompt is neither text nor token ids"),
        (b'{"prompt": [true]}', "prompt is neither text nor token ids"),
        (b'{"prompt": [-1]}', "prompt is neither text nor token ids"),
    ],
)
def test_lines_that_are_no_request(line: bytes, reason: str) -> None:
    with pytest.raises(BadLineError, match=reason):
        parse_line(line)


def test_an_emoji_written_as_a_surrogate_pair_is_text() -> None:
    (found,) = parse_line(b'{"prompt": "\\ud83d\\ude00"}')
    assert found.prompt == "\N{GRINNING FACE}"


KEYS = (
    *("messages", "prompt", "role", "content", "request", "response", "choices", "message", "text", "type", "index"),
    *("tools", "tool_calls", "function", "arguments", "name", "body", "n"),
)
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(KEYS), inner | st.sampled_from(["user", "assistant", "text"]), max_size=4)
    ),
    max_leaves=20,
)


@given(VALUE)
def test_any_json_is_a_request_or_a_bad_line(value: Any) -> None:
    try:
        found = _parse(value)
    except BadLineError:
        return
    assert found
    for request in found:
        assert isinstance(request_text(request), str)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_request_or_a_bad_line(line: bytes) -> None:
    try:
        parse_line(line)
    except BadLineError as error:
        assert str(error)


def _write(path: Path, lines: list[str]) -> None:
    path.write_text("".join(line + "\n" for line in lines))


def test_rows_are_named_by_file_and_line_and_blank_lines_are_nothing(tmp_path: Path) -> None:
    _write(tmp_path / "b.jsonl", [json.dumps(CHAT), "", json.dumps({"prompt": ["x", "y"]})])
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write(json.dumps({"prompt": "first"}) + "\n")
    log = PromptLog(f"{tmp_path}/*.jsonl*")
    expected = ["a.jsonl.gz:1", "b.jsonl:1", "b.jsonl:3#0", "b.jsonl:3#1"]
    assert [row.id.rpartition("/")[2] for row in log] == expected
    assert [row.id.rpartition("/")[2] for row in log] == expected  # and again
    assert log.lines == 3
    assert log.complete


def test_bad_lines_are_counted_and_refused_beyond_the_share(tmp_path: Path) -> None:
    good = [json.dumps({"prompt": f"p{place}"}) for place in range(98)]
    _write(tmp_path / "log.jsonl", [*good[:40], "{broken", *good[40:], '{"model": "m"}'])
    log = PromptLog(str(tmp_path / "log.jsonl"), bad_lines=0.02)
    assert len(list(log)) == 98
    assert log.bad == {"not JSON": 1, "neither messages nor prompt": 1}
    assert log.first_bad[0] == f"{tmp_path}/log.jsonl:41: not JSON"
    strict = PromptLog(str(tmp_path / "log.jsonl"), bad_lines=0.01)
    with pytest.raises(
        DataError, match=r"2 of 100 lines .* unusable, first .*log.jsonl:41: not JSON; .*:100:"
    ) as caught:
        list(strict)
    assert "data.log_bad_lines" in caught.value.next_step


def test_reading_can_be_limited_and_says_so(tmp_path: Path) -> None:
    _write(tmp_path / "log.jsonl", [json.dumps({"prompt": f"p{place}"}) for place in range(10)])
    log = PromptLog(str(tmp_path / "log.jsonl"), max_rows=4)
    assert len(list(log)) == 4
    assert (log.lines, log.complete) == (4, False)
    assert len(list(PromptLog(str(tmp_path / "log.jsonl"), max_rows=10))) == 10


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such prompt log"):
        log_files(f"{tmp_path}/*.jsonl")
    whole = gzip.compress(json.dumps(CHAT).encode() * 50)
    (tmp_path / "cut.gz").write_bytes(whole[:-20])
    with pytest.raises(DataError, match="cut.gz: damaged"):
        list(PromptLog(str(tmp_path / "cut.gz")))
