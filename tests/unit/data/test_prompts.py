"""Prompts: the same ids for calibration, evaluation and fine-tuning; logged requests as a server renders them."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.data.prompts import PromptTemplate, Rendered, RenderError, render_request, tokenize
from pipeline.data.rows import Request
from pipeline.errors import DataError
from tests.tiny import tokenizer

# A template with turns, as most have them: the generation prompt is the head of an assistant's turn.
TURNS = (
    "{% if tools %}tools {{ tools | length }} {% endif %}"
    "{% for m in messages %}{{ m.role }} : {{ m.content }}"
    "{% for call in m.tool_calls or [] %} call {{ call.function.name }} {{ call.function.arguments.a }}{% endfor %}"
    " </s> {% endfor %}{% if add_generation_prompt %}assistant : {% endif %}"
)


def _ids(text: str) -> list[int]:
    return list(tokenizer()(text, add_special_tokens=False)["input_ids"])


def _begins(words: Any) -> Any:
    from tokenizers.processors import TemplateProcessing

    words.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return words


def test_plain_and_chat() -> None:
    words = tokenizer()
    expected = words.convert_tokens_to_ids(["translate", "a1", "a2", "=>"])
    assert PromptTemplate("plain", "translate {source} =>").token_ids(words, "a1 a2") == expected
    assert PromptTemplate("chat", "translate {source} =>").token_ids(words, "a1 a2") == expected


def test_a_source_with_braces_is_data_not_a_format_string() -> None:
    messages = PromptTemplate("chat", "{source}", system="s").messages("{0} {source}")
    assert messages == [{"role": "system", "content": "s"}, {"role": "user", "content": "{0} {source}"}]


def test_doubled_bos_in_a_plain_prompt() -> None:
    """faults.md, row "doubled BOS": for plain prompts the tokenizer adds it, so a second one in the text is refused."""
    words = _begins(tokenizer())
    assert PromptTemplate("plain", "{source}").token_ids(words, "a1") == [1, *_ids("a1")]
    for user, source in (("<s> {source}", "a1"), ("{source}", "<s> a1")):
        with pytest.raises(DataError, match="two begin-of-sequence tokens"):
            PromptTemplate("plain", user).token_ids(words, source)


def test_doubled_bos_in_a_chat_prompt() -> None:
    """faults.md, row "doubled BOS": the template writes it, so the tokenizer must not add another."""
    words = _begins(tokenizer())
    words.chat_template = "<s> {{ messages[0].content }}"
    assert PromptTemplate("chat", "{source}").token_ids(words, "a1").count(1) == 1
    with pytest.raises(DataError, match="two begin-of-sequence tokens"):
        PromptTemplate("chat", "<s> {source}").token_ids(words, "a1")


def test_doubled_bos_in_a_logged_prompt() -> None:
    """faults.md, row "doubled BOS": a log may hold prompts that a client rendered, begin token included."""
    words = _begins(tokenizer())
    for text in ("a1", "<s> a1"):
        assert tokenize(words, [render_request(words, Request(prompt=text))])[0][0] == [1, *_ids("a1")]


def test_a_template_that_refuses_is_a_named_error() -> None:
    words = tokenizer()
    words.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(DataError, match="the chat template refuses 'a1': System role") as caught:
        PromptTemplate("chat", "{source}", system="s").token_ids(words, "a1")
    assert "prompt.system" in caught.value.next_step


def test_nothing_is_truncated_even_if_the_tokenizer_would() -> None:
    """faults.md, row "silent truncation": tokenizer.json may carry a truncation that a fine-tune once set."""
    words = tokenizer()
    words.backend_tokenizer.enable_truncation(max_length=4)
    words.model_max_length = 4
    long = " ".join(["a1"] * 50)
    assert PromptTemplate("plain", "{source}").token_ids(words, long) == _ids("a1") * 50


def test_a_conversation_keeps_system_turns_and_tools() -> None:
    words = tokenizer()
    words.chat_template = TURNS
    request = Request(
        messages=(
            {"role": "system", "content": "a1"},
            {"role": "user", "content": "a2"},
            {"role": "assistant", "content": "a3"},
            {"role": "user", "content": "a4"},
        ),
        tools=({"type": "function", "function": {"name": "f"}},),
        answer={"role": "assistant", "content": "b1"},
    )
    found = render_request(words, request)
    assert found.prompt == ("tools 1 system : a1 </s> user : a2 </s> assistant : a3 </s> user : a4 </s> assistant : ")
    assert found.answer == "b1 </s> "  # with the end of the turn, as decoding meets it
    assert not found.special


def test_an_answer_that_calls_a_tool_is_what_the_template_writes() -> None:
    words = tokenizer()
    words.chat_template = TURNS
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": "b2"}}}
    request = Request(
        messages=({"role": "user", "content": "a2"},),
        answer={"role": "assistant", "content": "", "tool_calls": [call]},
    )
    assert render_request(words, request).answer == " call f b2 </s> "


def test_an_answer_as_text_and_a_template_that_rewords() -> None:
    words = tokenizer()
    request = Request(messages=({"role": "user", "content": "a2"},), answer="b1 b2")
    words.chat_template = TURNS
    assert render_request(words, request).answer == "b1 b2 </s> "
    words.chat_template = TURNS.replace("assistant : ", "think : ")  # the prompt is no head of the whole
    assert render_request(words, request).answer == "b1 b2"


@pytest.mark.parametrize(
    ("template", "request_", "message"),
    [
        (None, Request(messages=({"role": "user", "content": "a"},)), "no chat template"),
        ("{{ raise_exception('turns must alternate') }}", Request(messages=({"role": "user", "content": "a"},)), "alt"),
        (TURNS, Request(prompt=(1, 2, 85)), "token id 85 is beyond the vocabulary of 85"),
    ],
)
def test_requests_that_cannot_be_rendered(template: str | None, request_: Request, message: str) -> None:
    words = tokenizer()
    words.chat_template = template
    with pytest.raises(RenderError, match=message):
        render_request(words, request_)


def test_a_mixed_batch_keeps_its_order() -> None:
    words = _begins(tokenizer())
    batch = [Rendered("a1", "b1", special=True), Rendered((7, 8)), Rendered("a2 a3"), Rendered("a4", special=True)]
    assert tokenize(words, batch) == [
        ([1, *_ids("a1")], _ids("b1")),
        ([7, 8], []),
        (_ids("a2 a3"), []),
        ([1, *_ids("a4")], []),
    ]
    assert tokenize(words, []) == []
