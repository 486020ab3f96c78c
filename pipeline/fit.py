"""Whether a model fits a GPU: weights, KV cache and what a running server needs besides. Pure arithmetic.

    memory * utilisation  >=  weights + activations + runtime + requests * tokens * KV bytes a token

Weights come from the checkpoint's own shapes, the KV cache from its config; activations and runtime are estimates,
whose assumptions are fields of ``Assumptions``. With tensor parallelism every GPU holds its share of each matrix, all
vectors, and the KV cache of its heads (at least one head).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint.shapes import Shapes
from pipeline.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from pipeline.quantize.recipes import Recipe

GIB = 2**30
BLOCK = 16  # tokens of a KV-cache block in vLLM
INT4_BLOCK = 128  # weights that share a 16-bit scale
EMBEDDINGS = ("embed_tokens", "wte", "wpe", "embed_in", "word_embeddings", "tok_embeddings")
# Layers that keep a whole KV cache; a sliding window is counted as if it were whole.
ATTENTION = ("full_attention", "attention", "sliding_attention", "chunked_attention")


@dataclass(frozen=True)
class Gpu:
    """``memory``: bytes that `nvidia-smi` shows; ``sm``: compute capability, 90 for 9.0."""

    name: str
    memory: int
    sm: int | None


# MiB as `nvidia-smi` shows them; drivers differ by a few.
GPUS = {
    name: Gpu(name, mib * 2**20, sm)
    for name, mib, sm in (
        ("t4", 15360, 75),
        ("v100-16", 16384, 70),
        ("v100-32", 32768, 70),
        ("rtx3090", 24576, 86),
        ("rtx4090", 24564, 89),
        ("rtx5090", 32607, 120),
        ("a10", 23028, 86),
        ("a30", 24576, 80),
        ("a40", 46068, 86),
        ("a6000", 49140, 86),
        ("l4", 23034, 89),
        ("l40s", 46068, 89),
        ("a100-40", 40960, 80),
        ("a100-80", 81920, 80),
        ("h100", 81559, 90),
        ("h200", 143771, 90),
        ("b200", 183359, 100),
    )
}


@dataclass(frozen=True)
class Assumptions:
    """What a server needs besides weights and cache. ``batch_tokens``: tokens of one prefill step (vLLM's default on
    large GPUs); ``utilisation``: the share of the memory that a server takes (vLLM's default); ``runtime``: CUDA
    context, kernels, CUDA graphs; ``communication``: NCCL buffers, with several GPUs. Bytes."""

    batch_tokens: int = 8192
    utilisation: float = 0.9
    runtime: int = GIB
    communication: int = GIB // 2


@dataclass(frozen=True)
class Architecture:
    """What of ``config.json`` decides the cache and the activations. ``latent``: values a token and layer of a
    compressed cache (DeepSeek's MLA), which GPUs do not share out; 0: keys and values for every head."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocabulary: int
    tied: bool
    latent: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Architecture:
        """Raises CheckpointError for a config that says too little, and for layers without a KV cache."""
        strange = sorted(set(config.get("layer_types") or ()) - set(ATTENTION))
        if strange:
            raise CheckpointError(
                f"config.json: layers of type {', '.join(strange)} keep another cache than keys and values",
                "this command knows attention only; start a server with a small limit and read its log",
            )
        try:
            heads, hidden = config["num_attention_heads"], config["hidden_size"]
            latent = config.get("kv_lora_rank") or 0
            return cls(
                layers=config["num_hidden_layers"],
                heads=heads,
                kv_heads=config.get("num_key_value_heads") or heads,
                head_dim=config.get("head_dim") or hidden // heads,
                hidden=hidden,
                intermediate=config.get("intermediate_size") or 4 * hidden,
                vocabulary=config["vocab_size"],
                tied=bool(config.get("tie_word_embeddings", False)),
                latent=latent + config["qk_rope_head_dim"] if latent else 0,
            )
        except KeyError as error:
            raise CheckpointError(f"config.json: no {error.args[0]}", "give a decoder's config.json") from error

    def kv_bytes(self, value_bytes: int, gpus: int = 1) -> int:
        """Bytes of the cache for one token on one of ``gpus`` GPUs."""
        if self.latent:
            return self.layers * self.latent * value_bytes
        return 2 * self.layers * max(1, self.kv_heads // gpus) * self.head_dim * value_bytes


@dataclass(frozen=True)
class Asked:
    """What must fit: so many ``sequences`` at a time of so many ``tokens``, prompt and answer together, on each of
    ``gpus`` tensor-parallel GPUs."""

    tokens: int
    sequences: int
    gpus: int = 1


@dataclass(frozen=True)
class Setting:
    """Where, for what, and on which assumptions."""

    gpu: Gpu
    asked: Asked
    given: Assumptions = Assumptions()


@dataclass(frozen=True)
class Fit:
    """One recipe on each GPU, in bytes. ``left``: for the cache (negative: the weights alone do not fit);
    ``sequences``: requests of the asked length that it holds; ``why_not`` is empty when it fits."""

    recipe: str
    weights: int
    activations: int
    runtime: int
    kv_per_token: int
    left: int
    kv_tokens: int
    sequences: int
    why_not: str

    @property
    def fits(self) -> bool:
        """Whether all that was asked fits."""
        return not self.why_not


def fit(name: str, recipe: Recipe | None, shapes: Shapes, model: Architecture, setting: Setting) -> Fit:
    """How one recipe (None: 16-bit weights) fits. Raises UsageError for GPUs that cannot share the model's heads."""
    gpu, asked, given = setting.gpu, setting.asked, setting.given
    if asked.gpus > 1 and model.heads % asked.gpus:
        raise UsageError(
            f"--gpus {asked.gpus}: {model.heads} attention heads cannot be shared out evenly", "take a divisor"
        )
    weights = weight_bytes(shapes, recipe, model, asked.gpus)
    activations = activation_bytes(model, asked, given)
    runtime = given.runtime + (given.communication if asked.gpus > 1 else 0)
    per_token = model.kv_bytes(1 if recipe is not None and recipe.kv_cache == "fp8" else 2, asked.gpus)
    usable = int(gpu.memory * given.utilisation)
    left = usable - weights - activations - runtime
    kv_tokens = max(0, left) // per_token // BLOCK * BLOCK
    each = math.ceil(asked.tokens / BLOCK) * BLOCK
    sequences = kv_tokens // each
    why_not = _unsuited(recipe, gpu)
    if not why_not and left <= 0:
        why_not = f"weights and overhead need {(usable - left) / GIB:.1f} GiB of {usable / GIB:.1f}"
    elif not why_not and sequences < asked.sequences:
        why_not = f"the cache holds {sequences} of {asked.sequences} requests"
    return Fit(name, weights, activations, runtime, per_token, left, kv_tokens, sequences, why_not)


def weight_bytes(shapes: Shapes, recipe: Recipe | None, model: Architecture, gpus: int = 1) -> int:
    """Bytes of the weights on one of ``gpus`` GPUs: what the recipe quantises in its format with its scales, the rest
    in 16 bit. A tied logits head is the embedding."""
    total = 0
    for name, shape in shapes.items():
        if name == "lm_head.weight" and model.tied:
            continue
        count = math.prod(shape)
        size = 2 * count
        if recipe is not None and _is_quantized(name, shape, recipe):
            size = {"int8": count + 4 * shape[0], "fp8": count, "int4": count // 2 + 2 * count // INT4_BLOCK}[
                recipe.weights
            ]
        total += math.ceil(size / gpus) if len(shape) > 1 else size
    return total


def activation_bytes(model: Architecture, asked: Asked, given: Assumptions) -> int:
    """The largest step: the MLP's three intermediate tensors and two hidden ones of a prefill, in 16 bit; and the
    logits of all requests twice in float32 (raw and sorted or normalised)."""
    prefill = given.batch_tokens * (3 * model.intermediate // asked.gpus + 2 * model.hidden) * 2
    logits = asked.sequences * model.vocabulary * 4 * 2
    return prefill + logits


def _is_quantized(name: str, shape: tuple[int, ...], recipe: Recipe) -> bool:
    """As ``Recipe.promises``, but by names alone: no model is built and ModelOpt is not loaded."""
    module, _, kind = name.rpartition(".")
    if kind != "weight" or len(shape) != 2 or module.rpartition(".")[2] in EMBEDDINGS:
        return False
    if any(fnmatchcase(module, pattern) for pattern in (*recipe.exclude, "*lm_head")):
        return False
    return not recipe.include or any(fnmatchcase(module, pattern) for pattern in recipe.include)


def _unsuited(recipe: Recipe | None, gpu: Gpu) -> str:
    """Why this GPU has no kernels for the recipe."""
    if recipe is None or gpu.sm is None:
        return ""
    low, high = recipe.min_sm, recipe.max_sm
    if (low is not None and gpu.sm < low) or (high is not None and gpu.sm > high):
        wanted = " to ".join(str(limit) for limit in (low, high) if limit is not None)
        return f"needs SM {wanted}, this is {gpu.sm}"
    return ""
