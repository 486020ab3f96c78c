"""Redaction: built-in patterns, hooks of the team's own, and what is counted."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.redact import Redaction, digits, email, load_redactor, phone, redactor_digest
from pipeline.data.rows import Request, Row
from pipeline.errors import DataError, InputError
from pipeline.files import digest_file
from tests.tiny import tokenizer


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("write to jane.doe+x@mail.example.org, please", "write to name@example.com, please"),
        ("a@b.co;c_d@e-f.com", "name@example.com;name@example.com"),
        ("an @mention and a@b are none", "an @mention and a@b are none"),
    ],
)
def test_email(text: str, expected: str) -> None:
    assert email(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("call +34 600 123 456 now", "call +00 000 000 000 now"),
        ("(030) 1234-5678", "(000) 0000-0000"),
        ("0049.30.1234567", "0000.00.0000000"),
        ("in 2024 we sold 1500 units", "in 2024 we sold 1500 units"),
        ("version 3.11.4", "version 3.11.4"),
    ],
)
def test_phone(text: str, expected: str) -> None:
    assert phone(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("card 4111 1111 1111 1111.", "card 0000 0000 0000 0000."),
        ("order 123456", "order 000000"),
        ("order 12345", "order 12345"),
        ("IBAN ES91-2100-0418", "IBAN ES00-0000-0000"),
    ],
)
def test_digits(text: str, expected: str) -> None:
    assert digits(text) == expected


@given(st.text(max_size=60))
def test_digits_and_phones_keep_the_shape(text: str) -> None:
    for redactor in (digits, phone):
        clean = redactor(text)
        assert clean is not None
        assert len(clean) == len(text)
        assert all(one == other or (one.isdigit() and other == "0") for one, other in zip(text, clean, strict=True))
        assert redactor(clean) == clean


HOOK = """
def scrub(text):
    return None if "secret" in text else text.replace("Jane", "Ann")

def broken(text):
    raise KeyError(text)

def number(text):
    return 3
"""


@pytest.fixture
def hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "privacy_hook.py"
    path.write_text(HOOK)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "privacy_hook", raising=False)
    return path


@pytest.mark.usefixtures("hook")
def test_a_hook_changes_texts_or_drops_the_sample() -> None:
    redaction = Redaction([load_redactor("privacy_hook:scrub"), email])
    rows = [
        Row("1", "Jane wrote to j@x.org", "ok", None),
        Row("2", "nothing here", "ok", None),
        Row("3", "fine", "the secret", None),
    ]
    found = [redaction.apply(row, None) for row in rows]
    assert found[0] == Row("1", "Ann wrote to name@example.com", "ok", None)
    assert found[1] is rows[1]
    assert found[2] is None


@pytest.mark.usefixtures("hook")
def test_every_text_of_a_conversation_is_redacted_and_its_structure_stays() -> None:
    call = {"id": "Jane", "type": "function", "function": {"name": "Jane", "arguments": {"to": ["Jane", 7]}}}
    request = Request(
        messages=(
            {"role": "system", "content": "You help Jane."},
            {"role": "user", "content": "I am Jane", "name": "Jane"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "Jane exists", "tool_call_id": "Jane"},
        ),
        tools=({"type": "function", "function": {"name": "Jane"}},),
        answer={"role": "assistant", "content": "Hello Jane"},
    )
    row = Redaction([load_redactor("privacy_hook:scrub")]).apply(Row("1", "x", "", None, request), None)
    assert row is not None and row.request is not None
    done = {"id": "Jane", "type": "function", "function": {"name": "Jane", "arguments": {"to": ["Ann", 7]}}}
    assert row.request.messages == (
        {"role": "system", "content": "You help Ann."},
        {"role": "user", "content": "I am Ann", "name": "Ann"},
        {"role": "assistant", "content": "", "tool_calls": [done]},
        {"role": "tool", "content": "Ann exists", "tool_call_id": "Jane"},
    )
    assert row.request.tools == request.tools
    assert row.request.answer == {"role": "assistant", "content": "Hello Ann"}
    assert "Jane" not in row.source.replace('"id": "Jane"', "").replace('"name": "Jane"', "")


def test_logged_token_ids_are_redacted_through_their_text() -> None:
    words = tokenizer()

    def swap(text: str) -> str:
        return text.replace("a1", "b1")

    a1, a2, b1 = words.convert_tokens_to_ids(["a1", "a2", "b1"])
    redaction = Redaction([swap])
    row = redaction.apply(Row("1", "x", "", None, Request(prompt=(a2, a1))), words)
    assert row is not None and row.request is not None
    assert row.request.prompt == (a2, b1)
    same = Row("2", "x", "", None, Request(prompt=(a2,)))
    assert redaction.apply(same, words) is same


@pytest.mark.usefixtures("hook")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:scrub", "No module named 'no_such_module'"),
        ("privacy_hook:nothing", "has no attribute 'nothing'"),
        ("privacy_hook:HOOKS", "has no attribute"),
        ("privacy_hook:__name__", "is no function"),
    ],
)
def test_hooks_that_do_not_load(name: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_redactor(name)


@pytest.mark.usefixtures("hook")
@pytest.mark.parametrize(("name", "message"), [("broken", "raised KeyError"), ("number", "returned int")])
def test_hooks_that_misbehave(name: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_redactor(f"privacy_hook:{name}")("text")


def test_the_hooks_source_is_fingerprinted_without_running_it(hook: Path) -> None:
    assert redactor_digest("email") == "built-in"
    hook.write_text("raise SystemExit('must not run')")
    assert redactor_digest("privacy_hook:scrub") == digest_file(hook)
    for name in ("no_such_module:scrub", "no.such.module:scrub"):
        with pytest.raises(InputError, match="no_such_module|no.such|No module"):
            redactor_digest(name)
