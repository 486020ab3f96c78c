"""A batch as one row of tokens with nothing padded, so that no padding can enter a statistic.

Linear layers, norms and experts treat each token alone, so samples of any length may stand one after the other in
one row ``[1, tokens]``. Attention must not look across samples: our attention function cuts the row into samples,
gives them a common length for PyTorch's causal kernel, and joins the results. Padding exists only inside it, after
the quantizers of keys and values have seen the real tokens; and a causal kernel never looks at what follows.

Not every architecture allows this (state-space layers, attention that ignores the interface of transformers), so
``check_packing`` tries it on two samples before it is used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

IMPLEMENTATION = "enginegate_packed"
# Relative error of the final hidden states, packed against alone. A sample that sees its neighbour is off by tens of
# per cent; float32 differs by about 1e-6, bfloat16 by about 1e-2 after tens of layers.
TOLERANCE = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 5e-2}


class Packed:
    """One batch on its way to the model: int64 tensors that share one ``buffer``, so that one copy moves them all.

    ``input_ids`` and ``position_ids``: ``[1, tokens]``. ``padded``: for each place of a ``[samples, longest]`` grid
    the token of the row that stands there (after a sample's end its last token), ``joined``: for each token of the row
    its place in the grid; both None when all samples are equally long and the grid is a view.
    """

    def __init__(self, buffer: Any, tokens: int, samples: int, longest: int) -> None:
        self.buffer, self.tokens, self.samples, self.longest = buffer, tokens, samples, longest
        self.input_ids, self.position_ids = buffer[:tokens][None], buffer[tokens : 2 * tokens][None]
        even = tokens == samples * longest
        self.joined = None if even else buffer[2 * tokens : 3 * tokens]
        self.padded = None if even else buffer[3 * tokens :]

    def on(self, device: Any) -> Packed:
        """The same on ``device``, copied without waiting where the memory is pinned."""
        if self.buffer.device == device:
            return self
        return Packed(self.buffer.to(device, non_blocking=True), self.tokens, self.samples, self.longest)


def pack(rows: Sequence[NDArray[np.int32]], pinned: bool = False) -> Packed:
    """The samples ``rows`` one after the other, on the host (in page-locked memory if ``pinned``)."""
    import torch

    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    tokens, longest = int(lengths.sum()), int(lengths.max())
    starts = np.cumsum(lengths) - lengths
    offsets = np.arange(tokens) - np.repeat(starts, lengths)
    parts: list[NDArray[Any]] = [np.concatenate(rows), offsets]
    if tokens != len(rows) * longest:
        within = np.minimum(np.arange(longest)[None, :], lengths[:, None] - 1)
        parts.append(np.repeat(np.arange(len(rows)) * longest, lengths) + offsets)
        parts.append((starts[:, None] + within).reshape(-1))
    buffer = torch.empty(sum(map(len, parts)), dtype=torch.int64, pin_memory=pinned)
    np.concatenate(parts, out=buffer.numpy())
    return Packed(buffer, tokens, len(rows), longest)


class PackedForward:
    """Runs a model's body on packed batches. ``with`` sets our attention, and puts the model's own back."""

    def __init__(self, body: Any) -> None:
        self._body = body
        self._batch: Packed | None = None

    def __call__(self, batch: Packed) -> Any:
        """The output of the body for one packed batch."""
        self._batch = batch
        try:
            return self._body(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False)
        finally:
            self._batch = None

    def __enter__(self) -> PackedForward:
        from transformers import AttentionInterface

        AttentionInterface.register(IMPLEMENTATION, _attend)
        _ACTIVE.append(self)
        self._before = self._body.config._attn_implementation
        self._body.set_attn_implementation(IMPLEMENTATION)
        return self

    def __exit__(self, *_: object) -> None:
        self._body.set_attn_implementation(self._before)
        _ACTIVE.remove(self)

    def attend(
        self,
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        *,
        sliding_window: int | None = None,
        **kwargs: Any,
    ) -> tuple[Any, None]:
        """Query, key and value: ``[1, heads, tokens, size]``; returns ``[1, tokens, heads, size]``."""
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        unknown = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
        if self._batch is None or attention_mask is not None or unknown or not getattr(module, "is_causal", True):
            raise NotImplementedError(f"attention that is more than causal: {', '.join(unknown) or 'a mask'}")
        batch = self._batch.on(query.device)

        def cut(states: Any) -> Any:
            # By token, as the projections wrote them: whole rows are copied, not pieces of each head.
            tokens = states[0].transpose(0, 1)
            grid = tokens if batch.padded is None else tokens.index_select(0, batch.padded)
            return grid.unflatten(0, (batch.samples, batch.longest)).transpose(1, 2)

        mask = None
        if sliding_window is not None and sliding_window < batch.longest:
            mask = _window(batch.longest, sliding_window, query.device)
        attended, _ = sdpa_attention_forward(
            module, cut(query), cut(key), cut(value), mask, scaling=kwargs.get("scaling"), is_causal=mask is None
        )
        row = attended.flatten(0, 1)
        return (row if batch.joined is None else row.index_select(0, batch.joined))[None], None


# One function is registered, once and for all: ModelOpt puts wrappers around whatever it finds under the name.
_ACTIVE: list[PackedForward] = []


def _attend(*args: Any, **kwargs: Any) -> tuple[Any, None]:
    return _ACTIVE[-1].attend(*args, **kwargs)


def _window(length: int, window: int, device: Any) -> Any:
    import torch

    place = torch.arange(length, device=device)
    behind = place[:, None] - place[None, :]
    return ((behind >= 0) & (behind < window))[None, None]


def check_packing(body: Any, rows: Sequence[NDArray[np.int32]], device: Any) -> str | None:
    """Why ``body`` cannot take packed samples; None if it can.

    Two samples go through it one by one with its own attention, then packed in both orders: the final hidden states
    must be the same but for rounding. Then the first one's tokens are changed: nothing of the second may move. That is
    the sharper test, since it compares equal shapes: a dense model gives the same bits.
    """
    import torch

    precision = str(next(body.parameters()).dtype).removeprefix("torch.")
    tolerance = TOLERANCE.get(precision, TOLERANCE["bfloat16"])

    def alone(row: NDArray[np.int32]) -> Any:
        return _hidden(body(input_ids=torch.from_numpy(row.astype(np.int64))[None].to(device), use_cache=False))

    with torch.no_grad():
        expected = [alone(row) for row in rows]
        try:
            with PackedForward(body) as forward:
                for first, second in ((0, 1), (1, 0)):
                    pair = [rows[first], rows[second]]
                    found = _hidden(forward(pack(pair).on(device)))
                    wanted = torch.cat([expected[first], expected[second]])
                    error = float((found - wanted).norm() / wanted.norm())
                    if not error <= tolerance:
                        return f"hidden states of packed samples differ by {100 * error:.3g} %"
                    pair[0] = pair[0][::-1]
                    mine, moved = (
                        states[len(pair[0]) :] for states in (found, _hidden(forward(pack(pair).on(device))))
                    )
                    # Of the token that moved most: what a sample's first tokens see of its neighbour fades soon.
                    error = float(((mine - moved).norm(dim=-1) / mine.norm(dim=-1)).max())
                    if not error <= tolerance:
                        return f"a packed sample sees its neighbour: a hidden state moves by {100 * error:.3g} %"
        except (NotImplementedError, TypeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
    return None


def _hidden(output: Any) -> Any:
    return output[0][0].float()


@contextlib.contextmanager
def rectangular(body: Any) -> Iterator[Any]:
    """The same as PackedForward for samples of one length and any model: rows ``[samples, length]``, no packing."""

    def forward(batch: Packed) -> Any:
        ids = batch.input_ids.view(batch.samples, batch.longest)
        return body(input_ids=ids, use_cache=False)

    yield forward
