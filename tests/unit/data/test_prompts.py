"""Prompts: the same ids for calibration, evaluation and fine-tuning."""

from __future__ import annotations

import pytest

from pipeline.data.prompts import PromptTemplate
from pipeline.errors import DataError
from tests.tiny import tokenizer


def test_plain_and_chat() -> None:
    words = tokenizer()
    expected = words.convert_tokens_to_ids(["translate", "a1", "a2", "=>"])
    assert PromptTemplate("plain", "translate {source} =>").token_ids(words, "a1 a2") == expected
    assert PromptTemplate("chat", "translate {source} =>").token_ids(words, "a1 a2") == expected


def test_a_source_with_braces_is_data_not_a_format_string() -> None:
    messages = PromptTemplate("chat", "{source}", system="s").messages("{0} {source}")
    assert messages == [{"role": "system", "content": "s"}, {"role": "user", "content": "{0} {source}"}]


def test_a_doubled_begin_token_is_refused() -> None:
    from tokenizers.processors import TemplateProcessing

    words = tokenizer()
    words.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    assert PromptTemplate("plain", "{source}").token_ids(words, "a1")[0] == 1
    with pytest.raises(DataError, match="two begin-of-sequence tokens"):
        PromptTemplate("plain", "<s> {source}").token_ids(words, "a1")
    # The chat template writes the token itself; the tokenizer must not add another.
    words.chat_template = "<s> {{ messages[0].content }}"
    assert PromptTemplate("chat", "{source}").token_ids(words, "a1").count(1) == 1
