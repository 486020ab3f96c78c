"""Redaction of calibration texts: built-in patterns, or a function of the team's own.

Off by default. What is replaced keeps its shape (a number stays as long, an address stays an address), because
calibration should see text as the model sees it.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.data.promptlog import request_text
from pipeline.data.rows import Request, Row
from pipeline.errors import DataError, InputError
from pipeline.files import digest_file

Redactor = Callable[[str], "str | None"]

_EMAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
# Eight or more digits in groups that blanks, dots, dashes, slashes or brackets join, perhaps after a plus.
_PHONE = re.compile(r"(?<![\w.])\+?\(?\d(?:[ .\-/()]{0,2}\d){7,14}(?![\w])")
_DIGITS = re.compile(r"\d(?:[ -]?\d){5,}")
_DIGIT = re.compile(r"\d")


def email(text: str) -> str:
    """Every e-mail address becomes ``name@example.com``."""
    return _EMAIL.sub("name@example.com", text)


def phone(text: str) -> str:
    """Digits of what looks like a telephone number become zeros."""
    return _PHONE.sub(_zeros, text)


def digits(text: str) -> str:
    """Runs of six digits and more (account, card, order numbers; blanks and dashes between them) become zeros."""
    return _DIGITS.sub(_zeros, text)


def _zeros(match: re.Match[str]) -> str:
    return _DIGIT.sub("0", match.group())


BUILT_IN: dict[str, Redactor] = {"email": email, "phone": phone, "digits": digits}


def load_redactor(name: str) -> Redactor:
    """A built-in redactor, or ``module:function`` from the project's folder. Raises DataError."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    place, _, function = name.partition(":")
    try:
        found: Any = getattr(importlib.import_module(place), function)
    except (ImportError, AttributeError) as error:
        raise DataError(
            f"data.redact: {name}: {error}", "name a function that `python -c 'import ...'` finds"
        ) from error
    if not callable(found):
        raise DataError(f"data.redact: {name} is no function", "name a function that takes and returns text")

    def checked(text: str) -> str | None:
        try:
            result = found(text)
        except Exception as error:
            raise DataError(
                f"data.redact: {name} raised {type(error).__name__}: {error}", "repair the function, and run again"
            ) from error
        if result is not None and not isinstance(result, str):
            raise DataError(f"data.redact: {name} returned {type(result).__name__}", "return text, or None to drop")
        return result

    return checked


def redactor_digest(name: str) -> str:
    """The digest of a hook's source file, without running it; ``built-in`` for ours. Raises InputError."""
    if name in BUILT_IN:
        return "built-in"
    module = name.partition(":")[0]
    try:
        spec = importlib.util.find_spec(module)
    except ImportError as error:
        raise InputError(f"data.redact: {name}: {error}", "put the module into the project's folder") from error
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        raise InputError(f"data.redact: {name}: no module {module}", "put the module into the project's folder")
    return digest_file(Path(spec.origin))


@dataclass(frozen=True)
class Redaction:
    """Applies redactors to rows, one after the other."""

    redactors: list[Redactor]

    def apply(self, row: Row, tokenizer: Any) -> Row | None:
        """The row with every text redacted (itself when nothing changed), or None when a redactor said to drop it."""
        if not self.redactors:
            return row
        try:
            return self._row(row, tokenizer)
        except _DroppedError:
            return None

    def _row(self, row: Row, tokenizer: Any) -> Row:
        if row.request is None:
            source, target = self._text(row.source), self._text(row.target)
            same = (source, target) == (row.source, row.target)
            return row if same else replace(row, source=source, target=target)
        request = self._request(row.request, tokenizer)
        return row if request == row.request else replace(row, request=request, source=request_text(request))

    def _request(self, request: Request, tokenizer: Any) -> Request:
        prompt = request.prompt
        if isinstance(prompt, tuple):
            text = tokenizer.decode(list(prompt), skip_special_tokens=False)
            if (clean := self._text(text)) != text:
                prompt = tuple(tokenizer(clean, add_special_tokens=False)["input_ids"])
        else:
            prompt = self._text(prompt)
        return replace(request, prompt=prompt, messages=self._any(request.messages), answer=self._any(request.answer))

    def _any(self, value: Any, key: str = "content") -> Any:
        """Redacts what people wrote: contents, names and arguments; roles, ids and function names stay."""
        if isinstance(value, str):
            return value if key in ("role", "type", "id", "tool_call_id") else self._text(value)
        if isinstance(value, dict):
            return {
                name: part if name == "name" and "arguments" in value else self._any(part, name)
                for name, part in value.items()
            }
        if isinstance(value, list | tuple):
            return type(value)(self._any(part, key) for part in value)
        return value

    def _text(self, text: str) -> str:
        for redactor in self.redactors:
            result = redactor(text) if text else text
            if result is None:
                raise _DroppedError
            text = result
        return text


class _DroppedError(Exception):
    """A redactor returned None: the sample must not be used."""
