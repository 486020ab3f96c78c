"""Trains the demo's LoRA adapter: English to Spanish on the training split of the demo corpus.

    python -m demo.finetune                      # writes demo/adapter (GPU: minutes, CPU: hours)
    python -m demo.finetune --epochs 1           # shorter, for a try

Chat-formatted prompts, loss on the answer only, fixed seed. Beside the adapter it writes ``training.json``
(settings, loss curve, BLEU and chrF before and after on the evaluation split, with sacrebleu's signatures)
and ``training.png``.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path
from typing import Any

from pipeline.checkpoint.demo import BASE, load_base
from pipeline.data.demo import load_demo
from pipeline.data.prompts import PromptTemplate

TEMPLATE = PromptTemplate(kind="chat", system="Translate English to Spanish.", user="{source}")
MAX_TOKENS = 256
ALL_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo/adapter"))
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--targets", nargs="+", default=list(ALL_PROJECTIONS))
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=17)
    args = parser.parse_args()

    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = load_base()
    model.to(device)
    held_out = load_demo("eval")
    rows = load_demo("train")
    print(f"{len(rows)} training pairs, {len(held_out)} held out, on {device}", flush=True)
    before = score(model, tokenizer, held_out, device)
    print(f"before: {before}", flush=True)

    lora = LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules=args.targets, task_type="CAUSAL_LM")
    model = get_peft_model(model, lora)
    model.peft_config["default"].base_model_name_or_path = BASE.requirement
    curve, seconds = train(model, [encode(tokenizer, row) for row in rows], args, device)
    model.eval()
    after = score(model, tokenizer, held_out, device)
    print(f"after:  {after}", flush=True)

    model.half().save_pretrained(args.out)  # fp16 halves the adapter; demo/README.md has its scores
    settings = {key: value for key, value in vars(args).items() if key != "out"}
    record = {
        "settings": settings,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "pairs": len(rows),
        "seconds": round(seconds, 1),
        "loss": curve,
        "before": before,
        "after": after,
    }
    (args.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    plot(curve, args.out / "training.png")


def encode(tokenizer: Any, row: dict[str, Any]) -> tuple[list[int], int]:
    """Token ids of prompt and answer, and the length of the prompt (no loss there)."""
    prompt = TEMPLATE.token_ids(tokenizer, row["source"])
    answer = tokenizer(row["target"], add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    return (prompt + answer)[:MAX_TOKENS], len(prompt)


def train(
    model: Any, examples: list[tuple[list[int], int]], args: argparse.Namespace, device: str
) -> tuple[list[float], float]:
    """Trains in place; returns the mean loss of each ten steps and the seconds it took."""
    import torch

    steps = args.epochs * math.ceil(len(examples) / args.batch)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=args.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=args.learning_rate, total_steps=steps, pct_start=0.05, anneal_strategy="cos"
    )
    order = random.Random(args.seed)
    model.train()
    losses: list[float] = []
    start = time.monotonic()
    for epoch in range(args.epochs):
        order.shuffle(examples)
        for first in range(0, len(examples), args.batch):
            ids, mask, labels = collate(examples[first : first + args.batch], device)
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            if len(losses) % 10 == 0:
                mean = sum(losses[-10:]) / 10
                print(f"epoch {epoch + 1} step {len(losses)}/{steps} loss {mean:.3f}", flush=True)
    curve = [round(sum(part) / len(part), 4) for part in (losses[i : i + 10] for i in range(0, len(losses), 10))]
    return curve, time.monotonic() - start


def collate(examples: list[tuple[list[int], int]], device: str) -> tuple[Any, Any, Any]:
    """Right-padded ids, attention mask and labels (-100 on prompt and padding), each ``[batch, length]``."""
    import torch

    width = max(len(ids) for ids, _ in examples)
    ids = torch.zeros(len(examples), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    labels = torch.full_like(ids, -100)
    for place, (tokens, prompt) in enumerate(examples):
        row = torch.tensor(tokens)
        ids[place, : len(tokens)] = row
        mask[place, : len(tokens)] = 1
        labels[place, prompt : len(tokens)] = row[prompt:]
    return ids.to(device), mask.to(device), labels.to(device)


def score(model: Any, tokenizer: Any, rows: list[dict[str, Any]], device: str) -> dict[str, Any]:
    """Greedy answers to every held-out row, scored with sacrebleu."""
    import torch
    from sacrebleu.metrics import BLEU, CHRF

    answers: dict[int, str] = {}
    prompts = [TEMPLATE.token_ids(tokenizer, row["source"]) for row in rows]
    by_length = sorted(range(len(rows)), key=lambda place: len(prompts[place]))
    for first in range(0, len(rows), 128):
        places = by_length[first : first + 128]
        width = max(len(prompts[place]) for place in places)
        ids = torch.tensor([[0] * (width - len(prompts[place])) + prompts[place] for place in places], device=device)
        mask = torch.tensor(
            [[0] * (width - len(prompts[place])) + [1] * len(prompts[place]) for place in places], device=device
        )
        with torch.inference_mode():
            out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=96, do_sample=False)
        texts = tokenizer.batch_decode(out[:, width:], skip_special_tokens=True)
        answers.update(zip(places, texts, strict=True))
    texts = [answers[place].strip() for place in range(len(rows))]
    references = [[row["target"] for row in rows]]
    result: dict[str, Any] = {"items": len(rows)}
    for name, metric in (("BLEU", BLEU()), ("chrF", CHRF())):
        result[name] = round(metric.corpus_score(texts, references).score, 2)
        result[f"{name}_signature"] = str(metric.get_signature())
    return result


def plot(curve: list[float], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3), layout="constrained")
    axes.plot([10 * (place + 1) for place in range(len(curve))], curve, color="#2b6cb0")
    axes.set(xlabel="step", ylabel="loss (answer tokens)", ylim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
