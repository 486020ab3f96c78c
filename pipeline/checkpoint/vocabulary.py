"""Tokenizer, end tokens and chat template of a checkpoint against its vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.checkpoint.layout import read_settings
from pipeline.errors import CheckpointError


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a checkpoint folder. Raises CheckpointError when it does not load."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    # tokenizers' own errors are plain Exceptions: nothing narrower covers a damaged tokenizer.json.
    except Exception as error:
        raise CheckpointError(
            f"{folder}: the tokenizer does not load: {error}", "save it beside the weights: tokenizer.save_pretrained"
        ) from error


def check_vocabulary(folder: Path, tokenizer: Any, rows: int) -> None:
    """No token id may lie beyond the embedding's ``rows``. Raises CheckpointError that names the token."""
    ids = [*tokenizer.get_vocab().values(), *tokenizer.all_special_ids, len(tokenizer) - 1]
    highest = max(ids)
    if highest >= rows:
        token = tokenizer.convert_ids_to_tokens(highest)
        raise CheckpointError(
            f"{folder}: the tokenizer knows {highest + 1} tokens, the model {rows} (first too many: {token!r})",
            "call model.resize_token_embeddings(len(tokenizer)) in the fine-tune, or save the matching tokenizer",
        )


def end_ids(folder: Path, config: dict[str, Any], tokenizer: Any, rows: int) -> list[int]:
    """Every id that ends an answer: generation config, config and tokenizer may each know some.

    Raises CheckpointError for none at all, one outside the vocabulary, and one that is no token.
    """
    generation = read_settings(folder / "generation_config.json")
    said = {
        "generation_config.json": generation.get("eos_token_id"),
        "config.json": config.get("eos_token_id"),
        "the tokenizer": tokenizer.eos_token_id,
    }
    found: set[int] = set()
    for origin, value in said.items():
        for number in value if isinstance(value, list) else [] if value is None else [value]:
            if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < rows:
                raise CheckpointError(
                    f"{folder}: end-of-sequence id {number} is outside the vocabulary of {rows} ({origin})",
                    f"correct eos_token_id in {origin}",
                )
            if tokenizer.convert_ids_to_tokens(number) is None:
                raise CheckpointError(
                    f"{folder}: end-of-sequence id {number} of {origin} is no token of the tokenizer",
                    "correct eos_token_id, or save the tokenizer that the model was trained with",
                )
            found.add(number)
    if not found:
        raise CheckpointError(
            f"{folder}: no end-of-sequence token anywhere", "set eos_token_id in generation_config.json"
        )
    return sorted(found)


def check_template(folder: Path, tokenizer: Any) -> dict[str, bool]:
    """The chat template must be there, render, and write the begin token at most once.

    Returns who begins a sequence: ``template_writes_bos`` and ``tokenizer_adds_bos``. Where both do, prompts stay
    right because chat prompts are tokenised without special tokens (``pipeline/data/prompts.py``).
    Raises CheckpointError.
    """
    if not tokenizer.chat_template:
        raise CheckpointError(
            f"{folder}: the tokenizer has no chat template but prompt.template is `chat`",
            "add chat_template.jinja to the checkpoint, or set prompt.template: plain",
        )
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": "hello"}], add_generation_prompt=True, tokenize=False
        )
    except (TemplateError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{folder}: the chat template does not render one user message: {error}",
            "correct chat_template.jinja, or save the template that the fine-tune used",
        ) from error
    bos = tokenizer.bos_token_id
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if bos is not None and ids[:2] == [bos, bos]:
        raise CheckpointError(
            f"{folder}: the chat template writes the begin-of-sequence token {tokenizer.bos_token!r} twice",
            "remove one of the two from chat_template.jinja",
        )
    return {
        "template_writes_bos": bos is not None and ids[:1] == [bos],
        "tokenizer_adds_bos": bos is not None and tokenizer("hello")["input_ids"][:1] == [bos],
    }
