"""The real ``vllm serve`` on a tiny random model: start, ask, stop; greedy tokens equal those of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.params import Baseline
from pipeline.records import Item
from pipeline.serving.client import ask
from pipeline.serving.info import served_model, server_version
from pipeline.serving.process import choose_port, started
from pipeline.serving.scoring import chosen, score
from pipeline.serving.vllm import vllm_command
from tests import tiny

VLLM = Path(__file__).parents[3] / ".venv-vllm/bin/vllm"


@pytest.mark.vllm
@pytest.mark.skipif(not VLLM.exists(), reason="no .venv-vllm: make setup-vllm")
def test_the_same_tokens_and_log_probabilities_as_transformers(tmp_path: Path) -> None:
    import torch

    model = tiny.write_checkpoint(tmp_path / "ckpt")
    words = tiny.tokenizer()
    baseline = Baseline(vllm=str(VLLM), env={"VLLM_CPU_KVCACHE_SPACE": "1"})
    items = [
        Item(
            row["id"],
            row["source"],
            row["target"],
            tuple(words(tiny.PROMPT.replace("{source}", row["source"]))["input_ids"]),
        )
        for row in tiny.rows(12, seed=1)
    ]
    command = vllm_command(
        baseline, tmp_path / "ckpt", name="baseline", model="toy", port=choose_port(), max_tokens=64, gpu=False
    )
    with started(command, tmp_path / "log", timeout_s=300) as server:
        assert served_model(server) == "toy"
        assert server_version(server)[0].isdigit()
        records, timings = ask(
            items,
            server.url,
            "toy",
            tokenizer=words,
            max_new_tokens=16,
            max_tokens=64,
            stop_token_ids=[words.eos_token_id],
            concurrency=8,
            order_seed=1,
        )
        forced = chosen(items, 8, words, max_tokens=64)
        scores = score(forced, server.url, "toy", concurrency=4, order_seed=1)
    assert len(scores) == 8
    for one, found in zip(forced, scores, strict=True):
        tokens = [*one.prompt_token_ids, *one.reference_token_ids]
        with torch.no_grad():
            expected = torch.log_softmax(model(torch.tensor([tokens])).logits[0], dim=-1)
        first = len(one.prompt_token_ids)
        given = [expected[place - 1, tokens[place]].item() for place in range(first, len(tokens))]
        assert found.log_probs == pytest.approx(given, abs=1e-3)
    for item, record, timing in zip(items, records, timings, strict=True):
        prompt = torch.tensor([item.prompt_token_ids])
        with torch.no_grad():
            whole = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, do_sample=False)
        answer = whole[0, prompt.shape[1] :].tolist()
        assert list(record.output_token_ids) == [token for token in answer if token != words.eos_token_id]
        assert timing.first_token_s is not None
        assert 0 < timing.first_token_s <= timing.total_s
