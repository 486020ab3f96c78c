"""From a row to the token ids that every arm is asked with.

One function renders prompts for calibration, evaluation and fine-tuning, so the three cannot differ. Logged requests
are rendered as a server renders them: messages and tools through the chat template, prompts as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.data.rows import Request, Row
from pipeline.errors import DataError


class RenderError(ValueError):
    """A logged request that this checkpoint's template or vocabulary does not take; the text is the reason."""


@dataclass(frozen=True)
class Rendered:
    """A prompt as text or token ids, the answer that followed it (may be empty), and whether the tokenizer adds its
    special tokens to the prompt (it must not where a chat template wrote them)."""

    prompt: str | tuple[int, ...]
    answer: str = ""
    special: bool = False


@dataclass(frozen=True)
class PromptTemplate:
    """How a row becomes a prompt: ``kind`` is ``chat`` (the tokenizer's chat template) or ``plain``.

    ``user`` holds ``{source}``; ``system`` is optional and only used by ``chat``.
    """

    kind: str
    user: str
    system: str | None = None

    def messages(self, source: str) -> list[dict[str, str]]:
        """The chat messages of a prompt."""
        system = [{"role": "system", "content": self.system}] if self.system is not None else []
        return [*system, {"role": "user", "content": self.user.replace("{source}", source)}]

    def render(self, tokenizer: Any, source: str, answer: str = "") -> Rendered:
        """A data set's row as prompt and answer. Raises DataError when the chat template refuses it."""
        if self.kind == "plain":
            return Rendered(self.user.replace("{source}", source), answer, special=True)
        from jinja2 import TemplateError

        try:
            prompt = tokenizer.apply_chat_template(self.messages(source), add_generation_prompt=True, tokenize=False)
        except (TemplateError, TypeError, ValueError) as error:
            raise DataError(
                f"data: the chat template refuses {source[:60]!r}: {error}",
                "set prompt.system to null if the template takes no system message, or correct the template",
            ) from error
        return Rendered(prompt, answer)

    def token_ids(self, tokenizer: Any, source: str) -> list[int]:
        """The prompt's token ids, ready to be continued. Raises DataError as ``render`` and ``refuse_doubled`` do."""
        ids = tokenize(tokenizer, [self.render(tokenizer, source)])[0][0]
        refuse_doubled(tokenizer, ids, source)
        return ids


def doubled_bos(tokenizer: Any, ids: Sequence[int]) -> bool:
    """Whether a prompt starts with two begin-of-sequence tokens, which costs points silently on some models."""
    bos = tokenizer.bos_token_id
    return bos is not None and list(ids[:2]) == [bos, bos]


def refuse_doubled(tokenizer: Any, ids: Sequence[int], source: str) -> None:
    """Raises DataError for a doubled begin-of-sequence token."""
    if doubled_bos(tokenizer, ids):
        raise DataError(
            f"the prompt starts with two begin-of-sequence tokens ({tokenizer.bos_token_id}): {source[:60]!r}",
            "remove the token's text from prompt.user, the row or the template: the tokenizer adds it already",
        )


def render_request(tokenizer: Any, request: Request) -> Rendered:
    """A logged request as prompt and answer.

    The answer of a chat is what the template writes after the prompt, its end-of-turn token and tool calls included;
    where the template words a finished conversation otherwise, it is the answer's text. A logged prompt that begins
    with the begin-of-sequence text gets no second one. Raises RenderError.
    """
    if not request.messages:
        return _render_prompt(tokenizer, request)
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise RenderError("the checkpoint has no chat template for logged messages")
    messages = list(request.messages)
    tools = list(request.tools) or None
    try:
        prompt = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
        if request.answer is None:
            return Rendered(prompt)
        answer = request.answer if isinstance(request.answer, dict) else _assistant(request.answer)
        whole = tokenizer.apply_chat_template([*messages, answer], tools=tools, tokenize=False)
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise RenderError(f"the chat template refuses it: {str(error)[:80]}") from error
    return Rendered(prompt, whole[len(prompt) :] if whole.startswith(prompt) else answer["content"])


def _assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _render_prompt(tokenizer: Any, request: Request) -> Rendered:
    answer = request.answer if isinstance(request.answer, str) else (request.answer or {}).get("content", "")
    if isinstance(request.prompt, str):
        begins = tokenizer.bos_token is not None and request.prompt.startswith(tokenizer.bos_token)
        return Rendered(request.prompt, answer, special=not begins)
    if max(request.prompt) >= len(tokenizer):
        raise RenderError(f"token id {max(request.prompt)} is beyond the vocabulary of {len(tokenizer)}")
    return Rendered(request.prompt, answer)


def tokenize(tokenizer: Any, rendered: Sequence[Rendered]) -> list[tuple[list[int], list[int]]]:
    """Token ids of prompt and answer of each, in batches; never truncated, whatever ``tokenizer.json`` says."""
    prompts: list[list[int]] = [list(one.prompt) if isinstance(one.prompt, tuple) else [] for one in rendered]
    for special in (False, True):
        places = [place for place, one in enumerate(rendered) if isinstance(one.prompt, str) and one.special is special]
        texts = [rendered[place].prompt for place in places]
        for place, ids in zip(places, _encode(tokenizer, texts, special), strict=True):
            prompts[place] = ids
    answers = _encode(tokenizer, [one.answer for one in rendered], special=False)
    return list(zip(prompts, answers, strict=True))


def _encode(tokenizer: Any, texts: Sequence[Any], special: bool) -> list[list[int]]:
    if not texts:
        return []
    return [list(ids) for ids in tokenizer(list(texts), add_special_tokens=special, truncation=False)["input_ids"]]


def render_row(tokenizer: Any, row: Row, template: PromptTemplate, *, answers: bool) -> Rendered:
    """A row of either kind. Raises RenderError (a logged request) or DataError (a data set's row)."""
    if row.request is None:
        return template.render(tokenizer, row.source, row.target if answers else "")
    request = row.request if answers else Request(row.request.messages, row.request.tools, row.request.prompt)
    return render_request(tokenizer, request)
