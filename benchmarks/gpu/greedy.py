"""Greedy tokens of a checkpoint in torch float16 and float32, for ``benchmarks.gpu.decode --tokens`` (needs torch).

    python -m benchmarks.gpu.greedy CHECKPOINT PROMPTS.json TARGET.json [--dtype float16] [--count 64]

``PROMPTS.json``: a list of lists of token ids. Ends of answers are ignored: every prompt gets ``count`` tokens.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--count", type=int, default=64)
    args = parser.parse_args()
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(
        args.checkpoint, dtype=getattr(torch, args.dtype), attn_implementation="eager"
    ).to(device)
    rows = []
    for prompt in json.loads(args.prompts.read_text()):
        ids, past, tokens, gaps = torch.tensor([prompt], device=device), None, [], []
        for _ in range(args.count):
            with torch.inference_mode():
                result = model(input_ids=ids, past_key_values=past, use_cache=True)
            past = result.past_key_values
            best = result.logits[0, -1].float().topk(2)
            tokens.append(int(best.indices[0]))
            gaps.append(float(best.values[0] - best.values[1]))
            ids = best.indices[:1][None]
        rows.append({"prompt": prompt, "tokens": tokens, "gaps": gaps})
    args.target.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
