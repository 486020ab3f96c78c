"""The decoder graph for TensorRT: the KV cache is a buffer of fixed capacity that is read where it lies.

The plain graph (``lowering.export``) returns a longer cache from each step, so each step would copy all of it. Here a
step gets each layer's buffer, and returns only the keys and values of its new tokens; the executor writes those into
the buffers. Attention multiplies the queries with the buffer and with the new keys apart from each other; only the
scores meet, in one softmax.

    inputs   input_ids [batch, new] int32; past_lengths [batch] int32: tokens of each row that its buffer holds;
             logit_rows [kept] int32: which of the batch * new places to give logits for, counted row by row;
             past_keys.<layer>, past_values.<layer> [batch, kv_heads, capacity, head_size]
    outputs  logits [kept, vocabulary]; new_keys.<layer>, new_values.<layer> [batch, kv_heads, new, head_size]

Token ``i`` of a row stands at position ``past_lengths + i``, and the buffer holds position ``p`` at place ``p``, so
rows shorter than ``new`` are padded on the right, where nothing looks. What a buffer holds beyond ``past_lengths`` is
masked and may be anything finite. Shapes are dynamic in batch, new, kept and capacity.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.engines.lowering.export import cache_shape
from pipeline.engines.lowering.trace import Forward, Signature, trace
from pipeline.errors import BuildError

OPSET = 17  # what TensorRT 8.6 reads; 10 and 11 read it too
MASKED = -30000.0  # added to masked scores: vanishes in the softmax, and float16 holds it
_NAME = "enginegate_buffers"  # under which transformers finds our attention


@dataclass(frozen=True)
class DecoderShape:
    """What must be known of a decoder to run it: a buffer is ``[rows, kv_heads, capacity, head_size]``."""

    layers: int
    kv_heads: int
    head_size: int
    vocabulary: int

    @property
    def inputs(self) -> list[str]:
        """The graph's inputs in order."""
        return ["input_ids", "past_lengths", "logit_rows", *self.past]

    @property
    def outputs(self) -> list[str]:
        """The graph's outputs in order."""
        return ["logits", *self.new]

    @property
    def past(self) -> list[str]:
        """The buffers, keys before values, layer by layer."""
        return [f"past_{part}.{layer}" for layer in range(self.layers) for part in ("keys", "values")]

    @property
    def new(self) -> list[str]:
        """The outputs that belong into the buffers, in the order of ``past``."""
        return [name.replace("past_", "new_") for name in self.past]


def decoder_shape(model: Any) -> DecoderShape:
    """The sizes of a Hugging Face causal LM."""
    return DecoderShape(**cache_shape(model), vocabulary=model.get_output_embeddings().weight.shape[0])


def export_decoder(model: Any, target: Path, *, capacity: int, opset: int = OPSET) -> dict[str, int]:
    """Writes ``model.onnx`` and ``model.onnx.data`` for a Hugging Face causal LM into the folder ``target``.

    The graph's floats are of the model's dtype. ``capacity`` is the largest that a buffer will have: the longest
    sequence, prompt and answer. Returns the fields of ``DecoderShape``. MatMuls and weights are named as in
    ``lowering.trace``. Raises BuildError for an architecture whose attention cannot be cut in two, or that gives other
    logits in this form than in its own.
    """
    shape = decoder_shape(model)
    tokens, expected = _expected(model)
    with buffered(model, capacity) as forward:
        _check_same(model, forward, tokens, expected)
        trace(model, forward, _signature(model, shape), target, opset)
    return asdict(shape)


def _signature(model: Any, shape: DecoderShape) -> Signature:
    import torch

    def ints(values: Any) -> Any:
        return torch.tensor(values, dtype=torch.int32, device=model.device)

    past = torch.zeros(2, shape.kv_heads, 5, shape.head_size, dtype=model.dtype, device=model.device)
    inputs = {
        "input_ids": ints([[1, 2, 3], [4, 5, 6]]),
        "past_lengths": ints([4, 2]),
        "logit_rows": ints([2, 5, 1, 3]),
        **{name: past.clone() for name in shape.past},
    }
    axes = {"input_ids": {0: "batch", 1: "new"}, "past_lengths": {0: "batch"}, "logit_rows": {0: "kept"}}
    axes |= {"logits": {0: "kept"}}
    axes |= {name: {0: "batch", 2: "capacity"} for name in shape.past}
    axes |= {name: {0: "batch", 2: "new"} for name in shape.new}
    return Signature(inputs, shape.outputs, axes)


@contextmanager
def buffered(model: Any, capacity: int) -> Iterator[Forward]:
    """Within the block, a function with the graph's inputs and outputs that runs ``model``; then it is as before.

    Raises BuildError for a model whose attention cannot be exchanged, or that has fewer than ``capacity`` positions.
    """
    import torch
    from transformers import AttentionInterface

    _refuse(model, capacity)
    step = _Step()
    places = torch.arange(capacity, dtype=torch.int32, device=model.device)

    def forward(input_ids: Any, past_lengths: Any, logit_rows: Any, *past: Any) -> tuple[Any, ...]:
        step.begin(places, input_ids, past_lengths, past)
        hook = model.get_output_embeddings().register_forward_pre_hook(
            lambda _module, inputs: (inputs[0].flatten(0, 1)[logit_rows.long()],)
        )
        try:
            result = model(
                input_ids=input_ids, position_ids=step.positions.long(), past_key_values=step, use_cache=True
            )
        finally:
            hook.remove()
        return (result.logits, *step.new)

    rotary = [module for module in model.modules() if type(module).__name__.endswith("RotaryEmbedding")]
    code: Any = sys.modules[type(model).__module__]
    rotate = getattr(code, "rotate_half", None)
    attention = model.config._attn_implementation
    AttentionInterface.register(_NAME, step.attend)
    model.set_attn_implementation(_NAME)
    try:
        if rotate is not None and torch.equal(rotate(torch.arange(8)), _rotate_half(torch.arange(8))):
            code.rotate_half = _rotate_half
        for module in rotary:
            module.forward = _table(module, places, model.dtype)
        yield forward
    finally:
        for module in rotary:
            module.__dict__.pop("forward", None)
        if rotate is not None:
            code.rotate_half = rotate
        model.set_attn_implementation(attention)


class _Step:
    """One pass: stands in for the cache of transformers, and holds what attention needs of the inputs."""

    def begin(self, places: Any, input_ids: Any, past_lengths: Any, past: tuple[Any, ...]) -> None:
        self.past = past
        self.new: list[Any] = []
        self._masks: dict[tuple[int, int | None], tuple[Any, Any]] = {}
        self._new_places = places[: input_ids.shape[1]]
        self._past_places = places[: past[0].shape[2]]
        self._past_lengths = past_lengths[:, None]
        self.positions = self._past_lengths + self._new_places  # [batch, new]

    def update(self, key: Any, value: Any, _layer: int, *_rest: Any, **_options: Any) -> tuple[Any, Any]:
        """What a model calls with its new keys and values, layer by layer."""
        self.new += [key, value]
        return key, value

    def get_seq_length(self, *_rest: Any) -> int:
        """Models ask for it where they are given no positions."""
        return 0

    def attend(self, module: Any, query: Any, key: Any, value: Any, _mask: Any, **options: Any) -> tuple[Any, None]:
        """Attention over buffer and new tokens; ``query [batch, heads, new, head_size]``, the others ``kv_heads``.

        Grouped queries are multiplied as more rows of their group's head, so no key is repeated.
        """
        import torch

        if options.get("s_aux") is not None:
            raise BuildError(
                f"{type(module).__name__} has attention sinks", "use another engine.backend for this model"
            )
        past_keys, past_values = self.past[2 * module.layer_idx : 2 * module.layer_idx + 2]
        heads, size = int(query.shape[1]), int(query.shape[3])  # plain numbers: no arithmetic of theirs in the graph
        group = heads // int(key.shape[1])
        scaling = options.get("scaling")
        query = query * (size**-0.5 if scaling is None else scaling)
        if group > 1:
            query = query.reshape(query.shape[0], heads // group, -1, size)  # [batch, kv_heads, group * new, head_size]
        scores = [query @ past_keys.transpose(2, 3), query @ key.transpose(2, 3)]
        if (cap := options.get("softcap")) is not None:
            scores = [torch.tanh(part / cap) * cap for part in scores]
        masks = self._mask(group, options.get("sliding_window"), query.dtype)
        weights = torch.cat([part + mask for part, mask in zip(scores, masks, strict=True)], dim=-1).softmax(-1)
        capacity = past_keys.shape[2]
        result = weights[..., :capacity] @ past_values + weights[..., capacity:] @ value
        if group > 1:
            result = result.reshape(result.shape[0], heads, -1, size)
        return result.transpose(1, 2), None

    def _mask(self, group: int, window: int | None, dtype: Any) -> tuple[Any, Any]:
        """What is added to the scores: ``[batch, 1, 1 or group * new, capacity]`` and ``[group * new, new]``."""
        import torch

        if (group, window) not in self._masks:
            past = self._past_places < self._past_lengths  # [batch, capacity]
            new = self._new_places[:, None] >= self._new_places  # [new, new]
            past = past[:, None, None]
            if window is not None:
                past = past & (self._past_places > self.positions[:, None, :, None] - window)
                new = new & (self._new_places > self._new_places[:, None] - window)
                past = past.repeat(1, 1, group, 1) if group > 1 else past
            new = torch.cat([new] * group) if group > 1 else new
            self._masks[group, window] = (_bias(past, dtype), _bias(new, dtype))
        return self._masks[group, window]


def _bias(valid: Any, dtype: Any) -> Any:
    import torch

    return torch.where(valid, 0.0, MASKED).to(dtype)


def _table(rotary: Any, places: Any, dtype: Any) -> Any:
    """A forward that looks cosines and sines up: no arithmetic on positions that float16 would spoil.

    The tables are made in the first call, which must come before the model is traced.
    """
    tables: dict[tuple[Any, ...], tuple[Any, Any]] = {}
    original = type(rotary).forward

    def forward(_hidden: Any, position_ids: Any, *layer_type: Any) -> tuple[Any, Any]:
        if layer_type not in tables:
            cosine, sine = original(rotary, places[:1].to(dtype), places[None], *layer_type)
            tables[layer_type] = cosine[0], sine[0]
        cosine, sine = tables[layer_type]
        return cosine[position_ids], sine[position_ids]

    return forward


def _rotate_half(values: Any) -> Any:
    """That of transformers with a fixed size: theirs leaves arithmetic on shapes in the graph."""
    import torch

    half = int(values.shape[-1]) // 2
    return torch.cat((-values[..., half:], values[..., :half]), dim=-1)


def _refuse(model: Any, max_tokens: int) -> None:
    name, config = type(model).__name__, model.config
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and max_tokens > limit:
        raise BuildError(f"the model has {limit} positions, engine.max_tokens is {max_tokens}", f"set it to {limit}")
    rope = getattr(config, "rope_parameters", None) or {}
    before = rope.get("original_max_position_embeddings") if rope.get("rope_type") == "longrope" else None
    if before is not None and max_tokens > before:
        raise BuildError(
            f"{name} rotates all positions differently once a sequence is longer than {before}",
            f"set engine.max_tokens to {before}, or use another engine.backend",
        )
    if not model._can_set_attn_implementation():
        raise BuildError(
            f"{name}: its attention cannot be exchanged (transformers has no AttentionInterface for it)",
            "use another engine.backend for this model",
        )


def _expected(model: Any) -> tuple[Any, Any]:
    """Two rows of five tokens, and the model's logits after each."""
    import torch

    vocabulary = model.get_output_embeddings().weight.shape[0]
    tokens = torch.randint(0, vocabulary, (2, 5), generator=torch.Generator().manual_seed(17)).to(model.device)
    with torch.inference_mode():
        return tokens, model(input_ids=tokens).logits[:, -1].float()


def _check_same(model: Any, forward: Forward, tokens: Any, expected: Any) -> None:
    """Reads ``tokens`` in two passes of uneven lengths. Raises BuildError when the logits are not ``expected``."""
    import torch

    shape = decoder_shape(model)

    def ints(values: Any) -> Any:
        return torch.tensor(values, dtype=torch.int32, device=model.device)

    past = torch.zeros(2, shape.kv_heads, 6, shape.head_size, dtype=model.dtype, device=model.device)
    buffers = [past.clone() for _ in shape.past]
    with torch.inference_mode():
        _, *new = forward(tokens[:, :4].int(), ints([0, 0]), ints([0]), *buffers)
        for buffer, part in zip(buffers, new, strict=True):
            buffer[:, :, :4] = part
        second = torch.stack([torch.cat([tokens[0, 4:], tokens[0, :2]]), tokens[1, 2:]]).int()
        found = forward(second, ints([4, 2]), ints([0, 5]), *buffers)[0].float()
    tolerance = 1e-3 if model.dtype == torch.float32 else 3e-2
    apart = ((found - expected).abs().max() / expected.abs().max()).item()
    if not apart <= tolerance:
        raise BuildError(
            f"{type(model).__name__} with its cache in buffers gives other logits ({apart:.2g} of the largest apart)",
            "use another engine.backend for this model",
        )
