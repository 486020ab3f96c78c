"""What ``enginegate show`` prints about a TensorRT engine.

Without a GPU: what the builder wrote down (``engine.json``). On the GPU that it was built for, with ``--layers``: each
layer's precision and kernel from the engine inspector, and its time from one run under the profiler.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.engines.tensorrt.library import version_numbers
from pipeline.engines.tensorrt.plan import PLAN, Description, open_plan, read_description
from pipeline.errors import ServerError, UsageError
from pipeline.report.text import columns

RUNS = 10  # timed ones; the first warms up
_BYTES = {"bool": 1, "int8": 1, "float8_e4m3fn": 1, "float16": 2, "bfloat16": 2, "int32": 4, "float32": 4, "int64": 8}
_COUNTED = ("matrix_multiply", "quantize", "dequantize")  # what is shown of the network


@dataclass(frozen=True)
class LayerRow:
    """One layer of the compiled engine; ``milliseconds``: of one run."""

    name: str
    kind: str
    precision: str
    tactic: str
    milliseconds: float


# From engine.json -----------------------------------------------------------------------------------------------------


def lines(folder: Path) -> list[str]:
    """Profiles, bindings and the network's layers, for people."""
    found = read_description(folder)
    text = [
        f"  {found.library} {found.version}, for SM {', '.join(found.sm)}",
        "",
        "  profiles (smallest, tuned for, largest)",
    ]
    text += columns([_profile_row(profile, found) for profile in found.profiles], "    ")
    text += ["", "  bindings"]
    text += columns([(name, way, dtype, shape) for name, way, dtype, shape in _binding_rows(found)], "    ")
    counted = {name: count for name, count in found.layers.items() if name.split()[0] in _COUNTED}
    text += ["", f"  network: {sum(found.layers.values())} layers, of them"]
    text += columns([(name, str(count)) for name, count in counted.items()], "    ")
    return text


def _profile_row(profile: Mapping[str, Any], found: Description) -> tuple[str, ...]:
    """Name, and each dynamic axis with its range: ``batch 1, 8, 8``."""
    axes: dict[str, tuple[int, ...]] = {}
    for binding in found.bindings:
        if binding.name in profile["shapes"]:
            for axis, size in enumerate(binding.shape):
                if isinstance(size, str):
                    axes[size] = tuple(shape[axis] for shape in profile["shapes"][binding.name])
    return (profile["name"], *(f"{axis} {', '.join(map(str, sizes))}" for axis, sizes in axes.items()))


def _binding_rows(found: Description) -> list[tuple[str, str, str, str]]:
    """One row a kind of tensor: the cache of all layers is one."""
    groups: dict[tuple[str, str, str, str], list[int]] = defaultdict(list)
    for binding in found.bindings:
        layer = re.search(r"\.(\d+)(?=\.|$)", binding.name)
        name = re.sub(r"\.\d+(?=\.|$)", ".*", binding.name)
        shape = "x".join(map(str, binding.shape))
        rows = groups[name, "in" if binding.input else "out", binding.dtype, shape]
        rows += [int(layer[1])] if layer else []
    return [
        (name.replace(".*", f".0-{max(layers)}") if layers else name, way, dtype, shape)
        for (name, way, dtype, shape), layers in groups.items()
    ]


def trtexec(folder: Path) -> list[str]:
    """The command line of TensorRT's own tool that builds this engine from its graph, one argument an entry."""
    found = read_description(folder)
    rtx = found.library == "tensorrt_rtx"
    command = ["tensorrt_rtx" if rtx else "trtexec", "--onnx=model.onnx", f"--saveEngine={PLAN}", "--skipInference"]
    if rtx:
        command.append(f"--computeCapabilities={','.join(found.sm)}")
    elif version_numbers(found.version)[0] == 8:
        kinds = {name.split()[0] for name in found.layers}
        half = any(binding.dtype == "float16" for binding in found.bindings)
        command += ["--fp16", "--precisionConstraints=prefer"] * half + ["--int8"] * ("quantize" in kinds)
    else:
        command.append("--stronglyTyped")
    command.append(f"--builderOptimizationLevel={found.summary['optimization_level']}")
    if found.summary["workspace_gib"]:
        command.append(f"--memPoolSize=workspace:{round(found.summary['workspace_gib'] * 1024)}")
    for place, profile in enumerate(found.profiles):
        command.append(f"--profile={place}")
        for which, flag in enumerate(("min", "opt", "max")):
            shapes = ",".join(f"{name}:{'x'.join(map(str, sizes[which]))}" for name, sizes in profile["shapes"].items())
            command.append(f"--{flag}Shapes={shapes}")
    return command


# On the GPU -----------------------------------------------------------------------------------------------------------


def layer_rows(folder: Path, profile: str | None = None, device: Any = None) -> list[LayerRow]:
    """Every layer as the engine runs it with ``profile`` (None: the first that decodes), at the shapes tuned for.

    Raises UsageError for an unknown profile, and what ``open_plan`` and the device raise.
    """
    from pipeline.engines.tensorrt.device import Device

    names = [one["name"] for one in read_description(folder).profiles]
    wanted = profile or next((name for name in names if name.startswith("decode")), names[0])
    if wanted not in names:
        raise UsageError(f"{folder}: no profile {wanted!r}", f"name one of: {', '.join(names)}")
    device = device or Device()
    found, engine, library = open_plan(folder, device.sm)
    context = engine.create_execution_context()
    if not context.set_optimization_profile_async(names.index(wanted), device.stream):
        raise ServerError(f"TensorRT refuses its profile {wanted}")
    times = _time(context, found, found.profiles[names.index(wanted)], library.trt, device)
    inspector = engine.create_engine_inspector()
    inspector.execution_context = context
    form = library.trt.LayerInformationFormat.JSON
    told = json.loads(inspector.get_engine_information(form))["Layers"]
    device.close()
    return rows_of(told, times)


def rows_of(layers: Sequence[Any], times: Mapping[str, float]) -> list[LayerRow]:
    """What the inspector tells (an object for each layer, or only its name) with the times, in order."""
    rows = []
    for layer in layers:
        if isinstance(layer, str):
            rows.append(LayerRow(layer, "", "", "", times.get(layer, 0.0)))
            continue
        ends = [*layer.get("Outputs", ()), *layer.get("Inputs", ())]
        kinds = [str(end.get("Format/Datatype") or end.get("Datatype") or "") for end in ends]
        tactic = str(layer.get("TacticName") or layer.get("TacticValue") or "")
        kind = str(layer.get("ParameterType") or layer.get("LayerType") or "")
        rows.append(LayerRow(layer["Name"], kind, _precision(kinds), tactic, times.get(layer["Name"], 0.0)))
    return rows


def _precision(kinds: Sequence[str]) -> str:
    """The narrowest type among a layer's ends, by the inspector's words: ``Half``, ``Int8``, ``FP8 ... format``."""
    for word in ("FP4", "FP8", "Int8", "Half", "FP16", "BFloat16", "BF16", "Float", "FP32", "Int32", "Int64", "Bool"):
        if any(re.search(rf"\b{word}\b", kind, re.IGNORECASE) for kind in kinds):
            return word
    return kinds[0] if kinds else ""


def _time(context: Any, found: Description, profile: Mapping[str, Any], trt: Any, device: Any) -> dict[str, float]:
    """Milliseconds of each layer in one run, the mean of ``RUNS``, with zeros in all inputs."""
    sizes = {}
    for name, shapes in profile["shapes"].items():
        sizes[name] = shapes[1]
        if not context.set_input_shape(name, tuple(shapes[1])):
            raise ServerError(f"TensorRT refuses {name} {shapes[1]}")
    for binding in found.bindings:
        shape = sizes.get(binding.name) or context.get_tensor_shape(binding.name)
        count = 1
        for size in shape:
            count *= int(size)
        length = max(256, count * _BYTES[binding.dtype])
        address = device.empty(length)
        device.clear(address, length)
        context.set_tensor_address(binding.name, address)
    totals: dict[str, float] = defaultdict(float)

    class Profiler(trt.IProfiler):  # type: ignore[misc,name-defined]
        """Adds up."""

        def __init__(self) -> None:
            trt.IProfiler.__init__(self)

        def report_layer_time(self, name: str, milliseconds: float) -> None:
            """Called for each layer of each run."""
            totals[name] += milliseconds

    context.execute_async_v3(device.stream)
    context.profiler = Profiler()
    for _ in range(RUNS):
        if not context.execute_async_v3(device.stream):
            raise ServerError("TensorRT does not run", "see the log above")
    return {name: total / RUNS for name, total in totals.items()}


def layer_lines(rows: Sequence[LayerRow]) -> list[str]:
    """The layers for people: those that take longest first, then sums by precision."""
    total = sum(row.milliseconds for row in rows)
    slowest = sorted(rows, key=lambda row: -row.milliseconds)
    text = ["", f"  {len(rows)} layers, {total:.3f} ms (each timed on its own, so more than a step takes)"]
    head = ("layer", "kind", "precision", "kernel", "ms")
    text += columns([head, *((*_short(row), f"{row.milliseconds:.4f}") for row in slowest)], "    ")
    sums: dict[str, tuple[int, float]] = {}
    for row in rows:
        count, spent = sums.get(row.precision, (0, 0.0))
        sums[row.precision] = (count + 1, spent + row.milliseconds)
    text += ["", "  by precision"]
    return text + columns(
        [(name or "?", f"{count}", f"{spent:.3f} ms") for name, (count, spent) in sums.items()], "    "
    )


def _short(row: LayerRow) -> tuple[str, str, str, str]:
    return (row.name[:60], row.kind, row.precision, row.tactic[:50])


def plain(folder: Path, rows: Sequence[LayerRow] | None) -> dict[str, Any]:
    """The same as JSON data."""
    found = asdict(read_description(folder))
    return found if rows is None else found | {"engine_layers": [asdict(row) for row in rows]}
