"""The calibration loop against a bare forward pass and against the usual padding loop, in one run.

``python -m benchmarks.calibration --checkpoint DIR``            any checkpoint, on the CPU or the GPU
``python -m benchmarks.calibration --shape llama-7b --lengths 512 --samples 10000``    random weights of a shape

All run the same model over random tokens: (a) our loop; (b) a bare forward pass, batches of the same size that lie
ready on the device, with the quantizers in place but off (``forward``), and collecting as ModelOpt's own do
(``quantizers``); (c) the usual loop that pads each batch to the longest sample of the set, logits included, ModelOpt
collecting. (b) and (c) do the same work in every batch, so some batches are enough. Then peak memory with the samples
and with four times as many. ``--scales-only`` runs our loop alone and gives a digest of all scales; under torchrun
it is shared between the ranks. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import copy
import gc
import hashlib
import json
import resource
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import modelopt.torch.quantization.model_calib as steps  # before there is a model: see pipeline/quantize/load.py
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.quantize.batches import Samples
from pipeline.quantize.calibrate import Calibration, quantize_model, usual_budget
from pipeline.quantize.load import load_for_calibration
from pipeline.quantize.ranks import Ranks
from pipeline.quantize.recipes import load_recipe
from pipeline.quantize.statistics import enabled_quantizers

SHAPES = {
    "smollm2-135m": {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
    },
    "llama-7b": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "tie_word_embeddings": False,
    },
}  # fmt: skip


def draw(lengths: str, count: int, vocabulary: int, seed: int = 0) -> list[list[int]]:
    """``count`` random samples: ``short`` (median 60 tokens), ``skewed`` (median 120, up to 2048), or of one length."""
    source = np.random.default_rng(seed)
    if lengths == "short":
        sizes = np.clip(source.lognormal(np.log(60), 0.35, count), 16, 256)
    elif lengths == "skewed":
        sizes = np.clip(source.lognormal(np.log(120), 1.0, count), 8, 2048)
    else:
        sizes = np.full(count, int(lengths))
    return [source.integers(5, vocabulary, int(size)).tolist() for size in sizes]


def make(args: argparse.Namespace, local: int = 0) -> Any:
    """The model: a checkpoint, or random weights (bfloat16 on a GPU, float32 on a CPU), the same on every rank."""
    if args.checkpoint:
        return load_for_calibration(Path(args.checkpoint), "int8", 4096, local=local)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    shape = SHAPES[args.shape] | ({"num_hidden_layers": args.layers} if args.layers else {})
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if cuda else torch.float32)
    with device:
        model = LlamaForCausalLM(LlamaConfig(max_position_embeddings=4096, **shape)).eval()
    torch.set_default_dtype(before)
    return model


def timed(run: Callable[[], None], device: Any) -> float:
    """Seconds that ``run`` takes, the device's work included."""
    _wait(device)
    start = time.perf_counter()
    run()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: Any) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def ours(model: Any, args: argparse.Namespace, rows: list[list[int]], ranks: Ranks | None = None) -> Calibration | None:
    """Our loop, quantizers inserted and scales computed."""
    return quantize_model(model, load_recipe(args.recipe), Samples(rows), args.budget, ranks=ranks)


def bare(model: Any, rows: list[list[int]], budget: int, batches: int, device: Any) -> tuple[float, float]:
    """Tokens a second of a bare forward pass, quantizers off and collecting: rectangles of the mean length."""
    length = round(sum(map(len, rows)) / len(rows))
    flat = np.concatenate([np.asarray(row) for row in rows])
    size = max(1, budget // length)
    need = size * length
    flat = np.resize(flat, need * batches)
    ready = [torch.from_numpy(part.reshape(size, length)).to(device) for part in np.split(flat, batches)]

    def run() -> None:
        with torch.no_grad():
            for ids in ready:
                model.base_model(input_ids=ids, use_cache=False)

    quantizers = enabled_quantizers(model)
    for quantizer in quantizers.values():
        quantizer.disable()
    run()
    off = timed(run, device)
    for quantizer in quantizers.values():
        quantizer.enable()
        quantizer._calibrator.reset()
    steps.enable_stats_collection(model)
    run()
    collecting = timed(run, device)
    steps.finish_stats_collection(model)
    return need * batches / off, need * batches / collecting


def padding(model: Any, rows: list[list[int]], budget: int, batches: int, device: Any) -> float:
    """Real tokens a second of the usual loop: fixed batches in the order of the set, all padded to its longest."""
    longest = max(map(len, rows))
    size = max(1, budget // longest)
    steps.enable_stats_collection(model)
    tokens = 0

    def run() -> None:
        nonlocal tokens
        tokens = 0
        with torch.no_grad():
            for number in range(batches):
                part = rows[number * size : (number + 1) * size]
                ids = torch.zeros((len(part), longest), dtype=torch.int64)
                mask = torch.zeros_like(ids)
                for place, row in enumerate(part):
                    ids[place, : len(row)] = torch.tensor(row)
                    mask[place, : len(row)] = 1
                model(input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False)
                tokens += sum(map(len, part))

    if device.type == "cuda":
        run()
    seconds = timed(run, device)
    steps.finish_stats_collection(model)
    return tokens / seconds


def digest(model: Any) -> str:
    """Over every scale of the model, bit for bit."""
    found = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        if "quantizer" in name:
            found.update(name.encode() + value.detach().float().cpu().numpy().tobytes())
    return found.hexdigest()


def peak_bytes(device: Any) -> int:
    """The most memory so far: of the GPU since the last reset (two copies of the weights included), or of this
    process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def scales_only(args: argparse.Namespace) -> dict[str, Any] | None:
    """Our loop alone, among the ranks of a launcher if there is one."""
    ranks = Ranks.from_environment(wait_s=120)
    model = make(args, ranks.local)
    rows = draw(args.lengths, args.samples, model.config.vocab_size)
    ranks.join()  # outside the measured time, as the start of the processes is
    found = ours(model, args, rows, ranks)
    if found is None:
        return None
    return {
        "recipe": args.recipe, "ranks": ranks.size, "samples": found.samples, "tokens": found.tokens,
        "batches": found.batches, "seconds": found.seconds, "tokens_per_s": found.tokens / found.seconds,
        "digest": digest(model), "batching": found.batching,
    }  # fmt: skip


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """All measurements of the module's description."""
    model = make(args)
    device = model.get_input_embeddings().weight.device
    rows = draw(args.lengths, args.samples, model.config.vocab_size)
    width = model.config.hidden_size
    args.budget = args.budget or usual_budget(width, sum(map(len, rows)), device.type == "cuda")
    fresh = copy.deepcopy(model) if args.samples_for_memory else None
    if device.type == "cuda":  # kernels are loaded and tuned by the first batches
        warm = copy.deepcopy(model) if args.shape != "llama-7b" else None
        if warm is not None:
            ours(warm, args, rows[: max(8, args.budget // 60)])
            del warm
    start = time.perf_counter()
    found = ours(model, args, rows)
    _wait(device)
    total = time.perf_counter() - start
    assert found is not None
    scales = digest(model)
    speed = found.tokens / found.seconds
    forward, quantizers = bare(model, rows, args.budget, args.batches, device)
    result: dict[str, Any] = {
        "model": Path(args.checkpoint).name if args.checkpoint else args.shape, "device": device.type,
        "recipe": args.recipe, "lengths": args.lengths, "samples": len(rows), "tokens": found.tokens,
        "batches": found.batches, "budget": args.budget, "batching": found.batching,
        "loop_s": found.seconds, "with_modelopt_s": total, "tokens_per_s": speed,
        "forward_tokens_per_s": forward, "quantizers_tokens_per_s": quantizers,
        "digest": scales, "to_forward": speed / forward, "to_quantizers": speed / quantizers,
    }  # fmt: skip
    if args.lengths == "skewed" or args.padding:
        padded = padding(model, rows, args.budget, args.batches, device)
        result |= {"padding_tokens_per_s": padded, "to_padding": speed / padded}
    del model
    if fresh is not None:
        weights = sum(value.numel() * value.element_size() for value in fresh.parameters())
        few = rows[: args.samples_for_memory]
        peaks = []
        for times in (1, 4):
            gc.collect()
            once = copy.deepcopy(fresh)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            ours(once, args, few * times)
            peaks.append(peak_bytes(device))
            del once
        result |= {
            "peak_gib": [round(peak / 2**30, 3) for peak in peaks],
            "weights_gib": round(weights / 2**30, 3),
            "peak_4n_to_n": peaks[1] / peaks[0],
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--checkpoint", help="a checkpoint folder")
    model.add_argument("--shape", choices=SHAPES, help="random weights of this shape")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has, for a quick look")
    parser.add_argument("--recipe", default="int8_sq")
    parser.add_argument("--lengths", default="skewed", help="short, skewed, or one length for all")
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--budget", type=int, help="tokens of one forward pass")
    parser.add_argument("--batches", type=int, default=8, help="batches of the loops that we compare with")
    parser.add_argument("--padding", action="store_true", help="the padding loop also on samples that are not skewed")
    parser.add_argument("--samples-for-memory", type=int, default=0, help="n of the memory measurement; 0: none")
    parser.add_argument("--scales-only", action="store_true", help="our loop alone, with a digest of the scales")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    result = scales_only(args) if args.scales_only else compare(args)
    if result is not None:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
