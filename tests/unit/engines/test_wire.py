"""Streamed text: the pieces join to the whole, and no piece holds half a character."""

from __future__ import annotations

import pytest

from pipeline.engines.wire import TextStream
from tests import tiny
from tests.unit.serving.fake_engine import ByteTokenizer


@pytest.mark.parametrize("text", ["", "Hola", "mañana 日本語 🙂!", "e\u0301"])
def test_pieces_are_whole_characters(text: str) -> None:
    stream = TextStream(ByteTokenizer(), skip_special_tokens=True)
    ids = list(text.encode())
    pieces = [stream.push([token], final=place == len(ids) - 1) for place, token in enumerate(ids)]
    assert "".join(pieces) == stream.text == text
    assert [piece for piece in pieces if piece] == list(text)


def test_a_broken_character_is_given_out_at_the_end() -> None:
    stream = TextStream(ByteTokenizer(), skip_special_tokens=True)
    assert stream.push([0xC3], final=False) == ""
    assert stream.push([], final=True) == "\N{REPLACEMENT CHARACTER}"


def test_spaces_between_words_are_kept() -> None:
    words = tiny.tokenizer()
    stream = TextStream(words, skip_special_tokens=True)
    ids = words("a1 a2 b3 a4")["input_ids"]
    pieces = [stream.push([token], final=False) for token in ids]
    assert pieces == ["a1", " a2", " b3", " a4"]
    assert stream.push([words.eos_token_id], final=True) == ""


def test_the_first_piece_is_decoded_after_the_prompt() -> None:
    """As vLLM does: the space before the first word belongs to the answer."""
    words = tiny.tokenizer()
    stream = TextStream(words, skip_special_tokens=True, prompt=words("a1 a2 a3 a4 a5 a6 =>")["input_ids"])
    ids = words("b1 b2")["input_ids"]
    assert [stream.push([token], final=False) for token in ids] == [" b1", " b2"]
    assert stream.push([], final=True) == ""


def test_a_prompt_that_ends_inside_a_character_takes_nothing_from_the_answer() -> None:
    stream = TextStream(ByteTokenizer(), skip_special_tokens=True, prompt=[65, 0xC3])
    assert stream.push(list(b"Hola"), final=True) == "Hola"
