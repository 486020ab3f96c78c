"""Tokenizer, end tokens and chat template against the vocabulary."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint.vocabulary import check_template, check_vocabulary, end_ids, load_tokenizer
from pipeline.data.prompts import PromptTemplate
from pipeline.errors import CheckpointError
from tests import tiny
from tests.unit.checkpoint.conftest import edit_json


def test_a_fitting_tokenizer_passes_and_one_token_more_does_not(checkpoint: Path) -> None:
    check_vocabulary(checkpoint, load_tokenizer(checkpoint), 85)
    check_vocabulary(checkpoint, load_tokenizer(checkpoint), 128)  # rows padded up to a round number
    content = json.loads((checkpoint / "tokenizer.json").read_text())
    content["model"]["vocab"]["extra"] = 85
    (checkpoint / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="knows 86 tokens, the model 85 \\(first too many: 'extra'"):
        check_vocabulary(checkpoint, load_tokenizer(checkpoint), 85)


def test_a_special_token_that_was_added_without_resizing_is_refused(checkpoint: Path) -> None:
    words = tiny.tokenizer()
    words.add_special_tokens({"pad_token": "<pad>"})
    with pytest.raises(CheckpointError, match="first too many: '<pad>'") as caught:
        check_vocabulary(checkpoint, words, 85)
    assert "resize_token_embeddings" in caught.value.next_step


@pytest.mark.parametrize(
    ("said", "expected"),
    [(2, [2]), ([2, 7], [2, 7]), (None, [2]), ([], [2]), ([7], [2, 7])],
)
def test_every_end_id_is_found(checkpoint: Path, said: Any, expected: list[int]) -> None:
    """The config and the tokenizer say 2."""
    edit_json(checkpoint / "generation_config.json", eos_token_id=said)
    assert end_ids(checkpoint, {"eos_token_id": 2}, load_tokenizer(checkpoint), 85) == expected


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ([2, 700], "id 700 is outside the vocabulary of 90 \\(generation_config.json"),
        (-1, "id -1 is outside"),
        ([True], "id True is outside"),
        ("</s>", "id </s> is outside"),
        ([2, 87], "id 87 of generation_config.json is no token of the tokenizer"),
    ],
)
def test_bad_end_ids_are_refused(checkpoint: Path, said: Any, message: str) -> None:
    edit_json(checkpoint / "generation_config.json", eos_token_id=said)
    with pytest.raises(CheckpointError, match=message):
        end_ids(checkpoint, {}, load_tokenizer(checkpoint), 90)


def test_no_end_id_at_all_is_refused(checkpoint: Path) -> None:
    words = tiny.tokenizer()
    words.eos_token = None
    edit_json(checkpoint / "generation_config.json", eos_token_id=None)
    with pytest.raises(CheckpointError, match="no end-of-sequence token anywhere"):
        end_ids(checkpoint, {}, words, 85)


def _begins(words: Any) -> None:
    """As a Llama tokenizer does: ``<s>`` before every text that is tokenised with special tokens."""
    from tokenizers.processors import TemplateProcessing

    words.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])


def test_doubled_bos(checkpoint: Path) -> None:
    """faults.md, row "doubled BOS": template and tokenizer both add BOS; the prompt holds it once all the same."""
    words = tiny.tokenizer()
    _begins(words)
    words.chat_template = "<s> {% for m in messages %}{{ m.content }}{% endfor %}"
    rendered = words.apply_chat_template([{"role": "user", "content": "a1"}], tokenize=False)
    assert words(rendered)["input_ids"][:2] == [1, 1]  # the fault, for who tokenises the rendered text again
    assert check_template(checkpoint, words) == {"template_writes_bos": True, "tokenizer_adds_bos": True}
    assert PromptTemplate("chat", "{source}").token_ids(words, "a1").count(1) == 1


def test_a_template_that_writes_bos_twice_is_refused(checkpoint: Path) -> None:
    """faults.md, row "doubled BOS": the template alone can double it."""
    words = tiny.tokenizer()
    words.chat_template = "<s> <s> {% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(CheckpointError, match="writes the begin-of-sequence token '<s>' twice"):
        check_template(checkpoint, words)


def test_who_begins_is_recorded(checkpoint: Path) -> None:
    words = tiny.tokenizer()
    assert check_template(checkpoint, words) == {"template_writes_bos": False, "tokenizer_adds_bos": False}
    _begins(words)
    assert check_template(checkpoint, words) == {"template_writes_bos": False, "tokenizer_adds_bos": True}


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template but prompt.template is `chat`"),
        ("{% for m in messages %}", "the chat template does not render one user message"),
        ("{{ raise_exception('a system message is needed') }}", "a system message is needed"),
    ],
)
def test_bad_templates_are_refused(checkpoint: Path, template: str | None, message: str) -> None:
    words = tiny.tokenizer()
    words.chat_template = template
    with pytest.raises(CheckpointError, match=message):
        check_template(checkpoint, words)


def _break(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")


def _lose(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


@pytest.mark.parametrize("spoil", [_break, _lose])
def test_a_tokenizer_that_does_not_load_is_refused(checkpoint: Path, spoil: Callable[[Path], None]) -> None:
    spoil(checkpoint)
    with pytest.raises(CheckpointError, match="the tokenizer does not load"):
        load_tokenizer(checkpoint)
