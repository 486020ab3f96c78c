"""From a row's source text to the token ids that every arm is asked with.

One function renders prompts for calibration, evaluation and fine-tuning, so the three cannot differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.errors import DataError


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

    def token_ids(self, tokenizer: Any, source: str) -> list[int]:
        """The prompt's token ids, ready to be continued.

        A doubled begin-of-sequence token (template and tokenizer both add one) is a DataError: it costs
        points silently on some models.
        """
        if self.kind == "plain":
            ids = list(tokenizer(self.user.replace("{source}", source))["input_ids"])
        else:
            text = tokenizer.apply_chat_template(self.messages(source), add_generation_prompt=True, tokenize=False)
            ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        bos = tokenizer.bos_token_id
        if self.kind == "plain" and bos is not None and ids[:2] == [bos, bos]:
            raise DataError(
                f"the prompt starts with two begin-of-sequence tokens ({bos}): {source[:60]!r}",
                "remove the token's text from prompt.user: the tokenizer adds it already",
            )
        return ids
