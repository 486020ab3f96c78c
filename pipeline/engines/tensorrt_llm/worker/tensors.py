"""Reads the linear layers of a unified Hugging Face export, quantised or not, one at a time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


class Refused(Exception):  # noqa: N818  it becomes our caller's error, with its next step
    """What is wrong with the input and what to do next."""

    def __init__(self, message: str, next_step: str) -> None:
        super().__init__(message)
        self.message = message
        self.next_step = next_step


class Folder:
    """The tensors of a folder's safetensors files by name; each is read when it is asked for."""

    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        self.path = path
        self._files: dict[str, Any] = {}
        for file in sorted(path.glob("*.safetensors")):
            opened: Any = safe_open(str(file), framework="pt")
            self._files.update(dict.fromkeys(opened.keys(), opened))
        if not self._files:
            raise Refused(f"{path}: no safetensors file", "run the stage before this one again")

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def get(self, name: str) -> Any:
        """The tensor of this name. Raises Refused when there is none."""
        if name not in self._files:
            raise Refused(
                f"{self.path}: no tensor {name}", "is this a checkpoint of the family that config.json names?"
            )
        return self._files[name].get_tensor(name)

    def find(self, name: str) -> Any:
        """The tensor of this name, or None."""
        return self.get(name) if name in self else None


@dataclass
class Linear:
    """One linear layer. ``kind`` is INT8, FP8 or INT4, None in high precision.

    ``weight``: ``[out, in]`` (INT4: two output channels in a byte, ``[out / 2, in]``). ``scale``: of the weight,
    ``[out]`` for INT8, ``[1]`` for FP8, ``[out, in / group]`` for INT4. ``input_scale``: ``[1]``. ``prequant``:
    ``[in]``, what the input is multiplied by first. A quantised value times its scale is the value.
    """

    name: str
    kind: str | None
    weight: Any
    bias: Any = None
    scale: Any = None
    input_scale: Any = None
    prequant: Any = None


def read_linear(export: Folder, name: str) -> Linear:
    """Reads the layer ``name`` (a module path). Raises Refused for a format that no engine here can hold."""
    import torch

    kinds = {torch.int8: "INT8", torch.float8_e4m3fn: "FP8", torch.uint8: "INT4"}
    weight = export.get(f"{name}.weight")
    kind = kinds.get(weight.dtype)
    layer = Linear(name, kind, weight, bias=export.find(f"{name}.bias"))
    if kind is None:
        return layer
    layer.scale = export.get(f"{name}.weight_scale").float()
    layer.prequant = export.find(f"{name}.pre_quant_scale")
    if kind != "INT4":
        layer.input_scale = export.get(f"{name}.input_scale").float().reshape(1)
    if kind == "FP8":
        if layer.scale.numel() != 1:
            raise Refused(f"{name}: {layer.scale.numel()} FP8 weight scales, not one", "use the recipe fp8")
        layer.scale = layer.scale.reshape(1)
    if kind == "INT8" and layer.scale.shape != weight.shape[:1]:
        raise Refused(
            f"{name}: one INT8 scale for the whole weight: accuracy falls to nothing with it in TensorRT-LLM "
            "(its issue 945)",
            "quantise weights with one scale a channel: recipes int8_sq or int8_mixed",
        )
    if kind != "FP8" and layer.prequant is None:
        # None was needed (plain INT8), or the export folded it into the norm before (INT4). Engines multiply anyway.
        layer.prequant = torch.ones(weight.shape[1])
    _refuse_bad_scales(layer)
    return layer


def _refuse_bad_scales(layer: Linear) -> None:
    import torch

    for what in ("scale", "input_scale", "prequant"):
        value = getattr(layer, what)
        if value is not None and not bool((torch.isfinite(value) & (value > 0)).all()):
            raise Refused(
                f"{layer.name}: {what} holds zero, negative, NaN or infinite values",
                "calibrate on data that reaches this layer, or exclude it in the recipe",
            )


def one_fp8_scale(layers: list[Linear], original: Folder) -> list[str]:
    """Gives FP8 layers that become one matrix the largest of their scales; returns the names of those that changed.

    A changed weight is made from the original one, as ModelOpt's own export does it: quantising the quantised weight
    again would round twice.
    """
    import torch

    largest = torch.stack([layer.scale for layer in layers]).amax(dim=0)
    changed = [layer for layer in layers if not torch.equal(layer.scale, largest)]
    for layer in changed:
        layer.weight = (original.get(f"{layer.name}.weight").float() / largest).to(torch.float8_e4m3fn)
        layer.scale = largest.clone()
    return [layer.name for layer in changed]


def one_input(layers: list[Linear]) -> None:
    """Makes layers that read one input agree on its scales. Raises Refused where they cannot."""
    import torch

    first = layers[0]
    for layer in layers[1:]:
        if layer.kind != first.kind:
            one, other = (kind or "high precision" for kind in (first.kind, layer.kind))
            raise Refused(
                f"{first.name} is in {one}, {layer.name} in {other}: they are one matrix in TensorRT-LLM",
                "let the recipe's `exclude` name all of them or none",
            )
        if first.prequant is not None and not torch.equal(first.prequant, layer.prequant):
            raise Refused(
                f"{first.name} and {layer.name} scale one input in two ways", "export the recipe again: dvc repro"
            )
    if first.input_scale is not None:
        largest = torch.stack([layer.input_scale for layer in layers]).amax(dim=0)
        for layer in layers:
            layer.input_scale = largest.clone()  # a file's tensors may not share memory
