"""The statistics of a calibration: for each activation quantizer the largest magnitude that it met.

ModelOpt's own calibrator waits for the GPU three times a call to look for NaN and reads every weight in every batch.
Here a hook on each quantizer keeps a running maximum on the device (a NaN stays one, so looking once is enough), and
the quantizers of q, k and v, which see one tensor, share one reduction. The maxima are ours, so they can be saved,
loaded and merged between ranks; then ModelOpt's calibrators are given them and its algorithm goes on from there.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pipeline.errors import QuantizationError


class Maxima:
    """Watches the enabled quantizers of ``model``.

    ``values``: quantizer -> largest magnitude, a tensor without axes, or ``[channels]`` for the inputs of linear
    layers if ``per_channel`` (SmoothQuant). ``called``: the names of all quantizers (weights' too) that were reached.
    """

    def __init__(self, model: Any, per_channel: bool) -> None:
        self._quantizers = enabled_quantizers(model)
        self._model = model
        self._per_channel = {name for name in self._quantizers if per_channel and self._of_linear(name)}
        self._last: tuple[Any, int, bool, Any] | None = None
        self._batch: dict[str, Any] = {}
        self.values: dict[str, Any] = {}
        self.called: set[str] = set()

    def _of_linear(self, quantizer: str) -> bool:
        from modelopt.torch.quantization.utils import is_quantized_linear

        parent, _, kind = quantizer.rpartition(".")
        return kind == "input_quantizer" and bool(is_quantized_linear(self._model.get_submodule(parent)))

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Quantizers are off and every input of theirs is seen; afterwards they are on again."""
        handles: dict[str, Any] = {}

        def reached(name: str) -> Callable[..., None]:
            def hook(*_: Any) -> None:
                self.called.add(name)
                handles.pop(name).remove()  # once is enough

            return hook

        def largest(name: str) -> Callable[..., None]:
            channels = name in self._per_channel

            def hook(_: Any, inputs: tuple[Any, ...]) -> None:
                self._see(name, inputs[0], channels)

            return hook

        for name, quantizer in self._quantizers.items():
            hook = reached(name) if is_weight(name) else largest(name)
            handles[name] = quantizer.register_forward_pre_hook(hook)
            quantizer.disable()
        try:
            yield
        finally:
            self._last = None
            for handle in handles.values():
                handle.remove()
            for quantizer in self._quantizers.values():
                quantizer.enable()

    def _see(self, name: str, inputs: Any, channels: bool) -> None:
        import torch

        if inputs.numel() == 0:  # an expert without a token
            return
        found = self._remembered(inputs, channels)
        if found is None:
            found = _largest(inputs, channels)
            self._last = (weakref.ref(inputs), inputs._version, channels, found)
        before = self._batch.get(name)  # fused experts share one quantizer
        self._batch[name] = found if before is None else torch.maximum(before, found)

    def _remembered(self, inputs: Any, channels: bool) -> Any:
        if self._last is None:
            return None
        last, version, per_channel, found = self._last
        return found if last() is inputs and version == inputs._version and per_channel == channels else None

    def keep(self) -> None:
        """Takes in what a forward pass has shown, all quantizers in a few launches."""
        import torch

        pairs = {}  # the quantizers of q, k and v hold the same tensors
        for name, found in self._batch.items():
            before = self.values.setdefault(name, found)
            pairs[id(before), id(found)] = (before, found)
        merged = dict(zip(pairs, torch._foreach_maximum(*map(list, zip(*pairs.values(), strict=True))), strict=True))
        self.values |= {name: merged[id(self.values[name]), id(found)] for name, found in self._batch.items()}
        self.called.update(self._batch)
        self._batch = {}

    def forget(self) -> None:
        """Drops what a forward pass has shown that did not end."""
        self._batch = {}
        self._last = None

    def check_finite(self) -> None:
        """Raises QuantizationError that names the first places where an activation was NaN or infinite."""
        import torch

        bad = [name for name, value in self.values.items() if not bool(torch.isfinite(value).all())]
        if bad:
            raise QuantizationError(
                f"activations are NaN or infinite in {len(bad)} places, first {', '.join(bad[:3])}",
                "the checkpoint overflows in this precision: load it in bfloat16 or float32, or look at its weights",
            )

    def merge(self, values: Mapping[str, Any], called: set[str]) -> None:
        """Takes in maxima found elsewhere (an earlier run, another rank); a maximum counts once however often."""
        import torch

        for name, value in values.items():
            if name not in self._quantizers:
                raise QuantizationError(f"saved statistics hold {name}, which this model has not", "delete them")
            mine = self.values.get(name)
            self.values[name] = value if mine is None else torch.maximum(mine, value.to(mine.device, mine.dtype))
        self.called.update(called)

    @property
    def watched(self) -> dict[str, int]:
        """All quantizers in a fixed order, each with the number of its values; 0 for those of weights."""
        found = {}
        for name in sorted(self._quantizers):
            parent = self._model.get_submodule(name.rpartition(".")[0])
            # The inputs of a linear layer are the last axis of its weight, transposed or not.
            found[name] = 0 if is_weight(name) else parent.weight.shape[-1] if name in self._per_channel else 1
        return found

    def give_to_modelopt(self, model: Any) -> None:
        """A ``forward_loop`` for ModelOpt: its calibrators hold our maxima as if they had seen the samples."""
        quantizers = enabled_quantizers(model)
        for name, value in self.values.items():
            quantizers[name]._calibrator._calib_amax = value


def _largest(inputs: Any, channels: bool) -> Any:
    """The largest magnitude, of each channel or of all; NaN if there is one."""
    import torch

    axes = tuple(range(inputs.dim() - 1)) if channels else None
    if inputs.is_cuda:  # one pass over the data: twice as fast as the two below on an H200
        return torch.linalg.vector_norm(inputs, float("inf"), dim=axes)
    if channels:  # on a CPU seven times as fast as the norm
        return torch.maximum(inputs.amax(axes), inputs.amin(axes).neg())
    least, most = torch.aminmax(inputs)
    return torch.maximum(most, least.neg())


def enabled_quantizers(model: Any) -> dict[str, Any]:
    """The enabled quantizers of a model that ModelOpt converted, by their path."""
    from modelopt.torch.quantization.nn import TensorQuantizer

    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, TensorQuantizer) and module.is_enabled
    }


def is_weight(quantizer: str) -> bool:
    """Whether the quantizer at this path is of a weight (fused experts have a list of them)."""
    return any(part.endswith(("weight_quantizer", "weight_quantizers")) for part in quantizer.split("."))
