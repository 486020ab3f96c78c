"""What a source yields: a row of a data set, or a request as production was asked it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Request:
    """One logged request: either chat ``messages`` (with ``tools``), or a ``prompt`` as text or token ids.

    ``answer`` is what was answered: an assistant message, a text, or None when the log does not say.
    """

    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    prompt: str | tuple[int, ...] = ""
    answer: dict[str, Any] | str | None = None


@dataclass(frozen=True)
class Row:
    """One pair, or one logged request.

    ``source`` is what is ranked and compared: a data set's source text, or all that a request says. ``group`` keeps
    related rows together (a document, a component). ``request`` is None for rows of a data set.
    """

    id: str
    source: str
    target: str
    group: str | None = None
    request: Request | None = field(default=None, compare=False)

    def texts(self) -> tuple[str, ...]:
        """The texts in which an evaluation item could hide: the source, or each user message of a request."""
        if self.request is None or not self.request.messages:
            return (self.source,)
        users = tuple(message["content"] for message in self.request.messages if message["role"] == "user")
        return users or (self.source,)
