"""A tiny checkpoint with something to lose: a two-layer Llama that learns a word-for-word dictionary in seconds.

The "language" has 40 words; each has one translation. A trained model answers most items exactly, so a gate has
accuracy to compare; an untrained one (``steps=0``) is random and good enough for numerics.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

WORDS = 40
PROMPT = "translate {source} =>"


def tokenizer() -> Any:
    """A word-level tokenizer with a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = ["<unk>", "<s>", "</s>", "translate", "=>"]
    vocabulary += [f"a{place}" for place in range(WORDS)] + [f"b{place}" for place in range(WORDS)]
    raw = Tokenizer(models.WordLevel({word: place for place, word in enumerate(vocabulary)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    fast.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return fast


def rows(count: int, seed: int, first_id: int = 0) -> list[dict[str, Any]]:
    """``count`` different pairs of 4 to 7 words."""
    order = random.Random(seed)
    found: dict[tuple[int, ...], None] = {}
    while len(found) < count:
        found[tuple(order.randrange(WORDS) for _ in range(order.randint(4, 7)))] = None
    return [
        {
            "id": f"item-{first_id + place:05d}",
            "source": " ".join(f"a{word}" for word in words),
            "target": " ".join(f"b{word}" for word in words),
            "group": f"g{place % 20}",
        }
        for place, words in enumerate(found)
    ]


def write_checkpoint(folder: Path, steps: int = 0, seed: int = 0) -> Any:
    """Writes the checkpoint (float32) after ``steps`` training steps; returns the model."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    words = tokenizer()
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    model = LlamaForCausalLM(config)
    if steps:
        _train(model, words, steps)
    folder.mkdir(parents=True, exist_ok=True)
    model.eval().save_pretrained(folder)
    words.save_pretrained(folder)
    return model


def _train(model: Any, words: Any, steps: int) -> None:
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps, pct_start=0.1)
    data = rows(6000, seed=99)
    order = random.Random(7)
    for _ in range(steps):
        batch = []
        for row in order.sample(data, 64):
            prompt = words(PROMPT.replace("{source}", row["source"]))["input_ids"]
            answer = [*words(row["target"])["input_ids"], words.eos_token_id]
            batch.append((prompt + answer, len(prompt)))
        width = max(len(ids) for ids, _ in batch)
        ids = torch.full((len(batch), width), words.eos_token_id)
        labels = torch.full((len(batch), width), -100)
        for place, (tokens, prompt) in enumerate(batch):
            ids[place, : len(tokens)] = torch.tensor(tokens)
            labels[place, prompt : len(tokens)] = torch.tensor(tokens[prompt:])
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def write_rows(path: Path, pairs: list[dict[str, Any]]) -> None:
    """Writes rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in pairs))
