"""A torch model's parameters, taken out while it is traced, and as NumPy arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from numpy.typing import NDArray


class Parameters:
    """A model's parameters and buffers, by name, which can be taken out of it and put back: a tied one once."""

    def __init__(self, model: Any) -> None:
        state = set(model.state_dict())
        self._places: dict[str, list[tuple[Any, str, str]]] = {}  # name -> module, its table, the name there
        self.values: dict[str, Any] = {}
        names: dict[int, str] = {}
        for path, module in model.named_modules():
            for table in ("_parameters", "_buffers"):
                for own, value in getattr(module, table).items():
                    name = f"{path}.{own}" if path else own
                    if value is None or name not in state:  # a buffer that is no part of a checkpoint is a constant
                        continue
                    first = names.setdefault(id(value), name)
                    self.values.setdefault(first, value.detach())
                    self._places.setdefault(first, []).append((module, table, own))

    @contextmanager
    def taken_out(self) -> Iterator[None]:
        """For the length of the block the model has none of them; ``put`` gives it others in their place."""
        held = [(module, table, own, getattr(module, table).pop(own)) for module, table, own in self._all()]
        try:
            yield
        finally:
            for module, table, own, value in held:
                module.__dict__.pop(own, None)
                getattr(module, table)[own] = value

    def put(self, values: Sequence[Any]) -> None:
        """Plain tensors as attributes, in the order of ``values``."""
        for places, value in zip(self._places.values(), values, strict=True):
            for module, _, own in places:
                module.__dict__[own] = value

    def _all(self) -> list[tuple[Any, str, str]]:
        return [place for places in self._places.values() for place in places]


def as_numpy(tensor: Any) -> NDArray[Any]:
    """A torch tensor's values, of every type that a graph stores: bfloat16 and float8 become those of ml_dtypes."""
    import ml_dtypes
    import torch

    values = tensor.detach().cpu().contiguous()
    known = {torch.bfloat16: ml_dtypes.bfloat16, torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn}.get(values.dtype)
    if known is not None:
        values = values.reshape(-1).view(torch.uint8)
    found: NDArray[Any] = values.numpy()
    return found if known is None else found.view(known).reshape(tuple(tensor.shape))
