"""Real traffic as rows: JSON lines of OpenAI-style requests, as gateways and servers log them.

A line is the body of a ``/v1/chat/completions`` request (``messages``, ``tools``) or of a ``/v1/completions`` request
(``prompt``: text, token ids, or a list of either), alone or under ``request`` or ``body``; the answer is taken from
``choices``, beside it or under ``response``. That covers plain bodies, request/response pairs and the batch API.
https://platform.openai.com/docs/api-reference
"""

from __future__ import annotations

import glob
import gzip
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.data.rows import Request, Row
from pipeline.errors import DataError, InputError

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class BadLineError(ValueError):
    """A line that cannot be used; the text is the reason, short enough to count by."""


def log_files(pattern: str) -> list[Path]:
    """The files of a log, sorted by name: one path, or a glob. Raises InputError for none."""
    found = [path for path in map(Path, sorted(glob.glob(pattern))) if path.is_file()]  # noqa: PTH207 - any root
    if not found:
        raise InputError(f"{pattern}: no such prompt log", "check data.calib_log and data.profile_log in params.yaml")
    return found


class PromptLog:
    """The rows of a log; it can be iterated again and again. After an iteration the attributes tell about it.

    ``lines`` is how many were read, ``bad`` counts the unusable ones by reason, ``first_bad`` names the first of
    them as ``file:line: reason``, and ``complete`` says that ``max_rows`` did not end the reading.
    """

    def __init__(self, pattern: str, *, bad_lines: float = 0.01, max_rows: int | None = None) -> None:
        self.files = log_files(pattern)
        self.bad_lines, self.max_rows = bad_lines, max_rows
        self.lines, self.complete = 0, True
        self.bad: Counter[str] = Counter()
        self.first_bad: list[str] = []

    def __iter__(self) -> Iterator[Row]:
        """Raises DataError, at the end, when more than the share ``bad_lines`` was unusable."""
        self.lines, self.complete, self.bad, self.first_bad = 0, True, Counter(), []
        for place, line in self._lines():
            if self.max_rows is not None and self.lines == self.max_rows:
                self.complete = False
                break
            self.lines += 1
            try:
                requests = parse_line(line)
            except BadLineError as error:
                self.refuse(place, str(error))
                continue
            for number, request in enumerate(requests):
                name = f"{place}#{number}" if len(requests) > 1 else place
                yield Row(name, request_text(request), "", None, request)
        self.judge(self.lines)

    def refuse(self, place: str, reason: str) -> None:
        """Counts one unusable line."""
        self.bad[reason] += 1
        if len(self.first_bad) < 3:
            self.first_bad.append(f"{place}: {reason}")

    def judge(self, lines: int) -> None:
        """Raises DataError when too many of ``lines`` were unusable."""
        count = self.bad.total()
        if count > self.bad_lines * lines:
            raise DataError(
                f"data: {count} of {lines} lines of the prompt log are unusable, first {'; '.join(self.first_bad)}",
                f"repair the log, or allow more than {self.bad_lines:.2%} with data.log_bad_lines",
            )

    def _lines(self) -> Iterator[tuple[str, bytes]]:
        """``file:line`` and the bytes of each line that is not blank; ``.gz`` files are read as they are."""
        for path in self.files:
            with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
                try:
                    for number, line in enumerate(file, start=1):
                        if line.strip():
                            yield f"{path.as_posix()}:{number}", line
                except (EOFError, gzip.BadGzipFile) as error:
                    raise DataError(f"{path}: damaged: {error}", "copy the file again") from error


def parse_line(line: bytes) -> list[Request]:
    """The requests of one line; a ``prompt`` list holds several. Raises BadLineError with the reason."""
    try:
        entry = json.loads(line.removeprefix(b"\xef\xbb\xbf"))
        if b"\\ud" in line.lower():  # half of a surrogate pair is valid JSON, but no text
            json.dumps(entry, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise BadLineError("half of a surrogate pair, which is no character") from error
    except (ValueError, RecursionError) as error:
        raise BadLineError("not JSON") from error
    body = _body(entry)
    answers = _answers(entry)
    if "messages" in body:
        messages = _messages(body["messages"])
        tools = body.get("tools") or []
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise BadLineError("tools are not a list of objects")
        return [Request(messages=messages, tools=tuple(tools), answer=answers.get(0))]
    if "prompt" in body:
        prompts = _prompts(body["prompt"])
        each = body["n"] if isinstance(body.get("n"), int) else 1  # choices of one prompt stand together
        return [Request(prompt=prompt, answer=answers.get(place * each)) for place, prompt in enumerate(prompts)]
    raise BadLineError("neither messages nor prompt")


def request_text(request: Request) -> str:
    """All that a request says, as one text: what is ranked, deduplicated and shown."""
    if request.messages:
        return "\n".join(f"{message['role']}: {_said(message)}" for message in request.messages)
    return request.prompt if isinstance(request.prompt, str) else " ".join(map(str, request.prompt))


def _said(message: dict[str, Any]) -> str:
    calls = message.get("tool_calls")
    return str(message["content"]) + (json.dumps(calls, sort_keys=True, ensure_ascii=False) if calls else "")


def _body(entry: Any) -> dict[str, Any]:
    for key in ("request", "body"):
        if isinstance(entry, dict) and key in entry:
            entry = entry[key]
            if isinstance(entry, str):  # a body that was logged as the text it was sent as
                try:
                    entry = json.loads(entry)
                except ValueError as error:
                    raise BadLineError(f"{key} is not JSON") from error
    if not isinstance(entry, dict):
        raise BadLineError("not a JSON object")
    return entry


def _answers(entry: dict[str, Any]) -> dict[int, dict[str, Any] | str]:
    """Index of a choice -> assistant message or text; empty when there was no answer, or an error."""
    response = entry.get("response", entry)
    if isinstance(response, str) and response:
        return {0: response}
    if isinstance(response, dict) and isinstance(response.get("body"), dict) and "response" in entry:
        response = response["body"]
    choices = response.get("choices") if isinstance(response, dict) else None
    found: dict[int, dict[str, Any] | str] = {}
    for place, choice in enumerate(choices if isinstance(choices, list) else []):
        if not isinstance(choice, dict):
            continue
        index = choice["index"] if isinstance(choice.get("index"), int) else place
        if isinstance(choice.get("text"), str):
            found[index] = choice["text"]
        elif isinstance(choice.get("message"), dict):
            message = _message({"role": "assistant"} | choice["message"])
            if message["content"] or message.get("tool_calls"):
                found[index] = message
    return found


def _messages(value: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list) or not value:
        raise BadLineError("messages are not a list of messages")
    return tuple(_message(message) for message in value)


def _message(value: Any) -> dict[str, Any]:
    """A message in the form that chat templates expect: content as text, arguments of tool calls as objects."""
    if not isinstance(value, dict) or value.get("role") not in _ROLES:
        raise BadLineError("a message without a known role")
    message: dict[str, Any] = {"role": value["role"], "content": _content(value.get("content"))}
    for key in ("name", "tool_call_id", "reasoning_content"):
        if isinstance(value.get(key), str):
            message[key] = value[key]
    if calls := value.get("tool_calls"):
        if not isinstance(calls, list):
            raise BadLineError("tool_calls are not a list")
        message["tool_calls"] = [_tool_call(call) for call in calls]
    if not message["content"] and "tool_calls" not in message and message["role"] in ("user", "system", "developer"):
        raise BadLineError("a message without content")
    return message


def _content(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise BadLineError("content is neither text nor parts")
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "input_text") or not isinstance(part.get("text"), str):
            raise BadLineError(f"content of type {kind}: only text can be calibrated on")
        texts.append(part["text"])
    return "\n".join(texts)


def _tool_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadLineError("a tool call without a function")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):  # as the API has it; templates write objects
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise BadLineError("arguments of a tool call are not JSON") from error
    return {**call, "function": {**function, "arguments": arguments}}


def _prompts(value: Any) -> list[str | tuple[int, ...]]:
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not value:
        raise BadLineError("prompt is neither text nor token ids")
    if all(_is_id(item) for item in value):
        return [tuple(value)]
    found: list[str | tuple[int, ...]] = []
    for item in value:
        if isinstance(item, str) and item.strip():
            found.append(item)
        elif isinstance(item, list) and item and all(_is_id(token) for token in item):
            found.append(tuple(item))
        else:
            raise BadLineError("prompt is neither text nor token ids")
    return found


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
