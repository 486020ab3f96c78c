"""TensorRT: one code for full TensorRT (8.6, 10, 11: package ``tensorrt``) and TensorRT for RTX.

    graph.py -> lowering/ (Q/DQ, verifier) -> builder.py (plan) -> plan.py (guard) -> executor.py (decoding)

    library.py   which TensorRT is here, and what it can do (features by attribute, SMs, precisions)
    graph.py     the decoder graph with fixed KV buffers that is exported for this backend
    profiles.py  optimisation profiles from the graph's own dynamic axes
    builder.py   ONNX -> plan, with timing cache, memory limits, progress
    plan.py      ``engine.json`` beside the plan, and the checks before a plan is deserialised
    inspect.py   what ``enginegate show`` prints about an engine
    device.py, executor.py   the runtime: device memory and CUDA graphs, decoding

Interface between building and running (both sides keep to it):

* An engine folder holds ``model.plan``, ``engine.json`` (``plan.Description``), ``tokenizer/``, ``manifest.json``.
* ``graph.export_decoder(model, target, max_tokens=..., opset=...) -> dict`` writes ``model.onnx`` and its data with
  ``lowering.trace.trace``; what it returns becomes ``cache.json`` beside them and then ``cache`` in ``engine.json``.
  Axes are named, and ``profiles.ranges`` has a row for each name. MatMuls are named after modules (``trace`` does it).
* ``executor.TensorRTExecutor(folder, max_batch=..., max_tokens=...)`` asks ``device.py`` for the SM of the GPU and
  calls ``plan.open_plan(folder, sm)``, which refuses before it deserialises and returns
  ``(Description, ICudaEngine, Library)``.
* ``library.py``, ``profiles.py``, ``builder.py``, ``plan.py``, ``executor.py`` and ``device.py`` import nothing but
  the bindings, NumPy and ``cuda-python``, and run on Python 3.10 too (TensorRT 8.6 has no wheel for a newer one).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.engines import BuildInputs, refuse_recipe
from pipeline.engines.tensorrt.library import Library, load_library, refuse_target
from pipeline.errors import BuildError

if TYPE_CHECKING:
    from pipeline.engines.tensorrt.executor import TensorRTExecutor
    from pipeline.params import Engine
    from pipeline.quantize.recipes import Recipe

INT8_SM = 75  # the oldest GPU with INT8 tensor cores
FP8_SM = 89


def preflight(recipe: Recipe | None, engine: Engine, platform: dict[str, Any]) -> None:
    """Refuses what this library does not compile or this GPU does not run; see ``pipeline.engines.Backend``."""
    refuse_recipe(recipe, "tensorrt")
    here = platform.get("device", {}).get("sm")
    library = _library(engine)
    targets = _targets(engine, here)
    refuse_target(library, targets, here)
    if recipe is None:
        return
    fp8 = "fp8" in (recipe.weights, recipe.kv_cache)
    if fp8 and not library.fp8:
        raise BuildError(f"{library.label} has no FP8", "take an int8 recipe, or install TensorRT 10 or newer")
    needed = max(FP8_SM if fp8 else INT8_SM, recipe.min_sm or 0)
    if old := [sm for sm in targets if int(sm) < needed]:
        raise BuildError(
            f"{'FP8' if fp8 else 'INT8'} ({recipe.description}) needs SM {needed} or newer, not SM {', '.join(old)}",
            "take an int8 recipe" if fp8 and int(old[0]) >= INT8_SM else "take the engine without quantisation there",
        )
    if recipe.max_sm is not None and (new := [sm for sm in targets if int(sm) > recipe.max_sm]):
        raise BuildError(
            f"the recipe ({recipe.description}) ends with SM {recipe.max_sm}; this is SM {', '.join(new)}",
            "take another recipe there",
        )


def plain_dtype(engine: Engine) -> str:
    """Of the graph; see ``Library.graph_dtype``."""
    return _library(engine).graph_dtype(engine.tensorrt.dtype)


def export_graph(model: Any, engine: Engine, target: Path) -> dict[str, Any]:
    """The decoder graph of ``graph.py``, in the opset that the library reads."""
    from pipeline.engines.tensorrt.graph import export_decoder

    return dict(export_decoder(model, target, capacity=engine.max_tokens, opset=_library(engine).opset))


def compile_engine(inputs: BuildInputs, target: Path) -> dict[str, Any]:
    """Writes ``model.plan`` and ``engine.json`` into ``target``; see ``pipeline.engines.Backend``."""
    from pipeline.engines.tensorrt.builder import Settings, build_plan
    from pipeline.files import read_json

    engine, options = inputs.engine, inputs.engine.tensorrt
    here = inputs.platform["device"]["sm"]
    library = _library(engine)
    targets = _targets(engine, here)
    settings = Settings(
        max_batch=engine.max_batch,
        max_tokens=engine.max_tokens,
        sm=tuple(targets),
        buckets=options.decode_batches,
        optimization_level=options.optimization_level,
        workspace_gib=options.workspace_gib,
        timing_cache=None if options.timing_cache is None else Path(options.timing_cache),
        log=inputs.log,
        half=options.dtype == "float16",
    )
    lowered = target / "lowered"
    lowered.mkdir()
    try:
        structure = _lower(inputs, library, lowered)
        if options.join_linears:
            structure["joined"] = _join(lowered)
        graph = lowered / ("joined.onnx" if options.join_linears else "model.onnx")
        built = build_plan(library, graph, target, read_json(inputs.plain / "cache.json"), settings)
    finally:
        shutil.rmtree(lowered)
    built.description.write(target)
    names = f"{library.label} for SM {', '.join(targets)}"
    return (
        built.record
        | structure
        | {
            "dtype": _dtype(inputs),
            "summary": f"{names}: {_counted(structure)}",
            "versions": {library.name: library.version, "onnx": _version("onnx")},
            **({} if here in targets else _elsewhere(library, targets)),
        }
    )


def _elsewhere(library: Library, targets: list[str]) -> dict[str, Any]:
    """What the manifest says of an engine that does not run here: so no verdict takes it for one that did."""
    return {
        "platform": {"gpu": None, "driver": None, "sm": " ".join(targets), "tensorrt": library.label},
        "unchecked": f"compiled ahead of time for SM {', '.join(targets)}",
    }


def open_executor(folder: Path, *, max_batch: int, max_tokens: int, threads: int) -> TensorRTExecutor:  # noqa: ARG001
    """Opens an engine folder for decoding on the first GPU."""
    from pipeline.engines.tensorrt.executor import TensorRTExecutor

    return TensorRTExecutor(folder, max_batch=max_batch, max_tokens=max_tokens)


def _library(engine: Engine) -> Library:
    return load_library(engine.tensorrt.library, ahead=bool(engine.tensorrt.sm))


def _targets(engine: Engine, here: str | None) -> list[str]:
    """The compute capabilities to compile for."""
    if engine.tensorrt.sm:
        return [str(sm) for sm in engine.tensorrt.sm]
    if here is None:
        raise BuildError(
            "there is no GPU to compile for",
            "run it on one; or compile ahead of time for another machine: engine.tensorrt.sm: [89] (docs/tensorrt.md)",
        )
    return [here]


def _lower(inputs: BuildInputs, library: Library, folder: Path) -> dict[str, Any]:
    """The graph that is compiled, in ``folder``: plain, or with Q/DQ. Returns how many layers are what."""
    import onnx

    from pipeline.engines.lowering.qdq import check_untouched, insert_qdq
    from pipeline.engines.lowering.quantized import QuantizedCheckpoint
    from pipeline.engines.lowering.verify import verify
    from pipeline.engines.lowering.weights import WeightFile

    model = onnx.load(str(inputs.plain / "model.onnx"), load_external_data=False)
    with WeightFile(folder / "model.onnx") as weights:
        if inputs.quantized is not None:
            with QuantizedCheckpoint(inputs.quantized / "checkpoint") as checkpoint:
                check_untouched(model, inputs.plain, checkpoint)
                insert_qdq(model, checkpoint, weights.add, float_weights=not library.strongly_typed)
        weights.save(model, inputs.plain)
    if inputs.quantized is None:
        return {"quantized_matmuls": 0, "quantized_cache": 0}
    model = onnx.load(str(folder / "model.onnx"), load_external_data=False)
    found = verify(model, folder, inputs.quantized / "checkpoint", inputs.recipe)
    return {"quantized_matmuls": found.quantized, "quantized_cache": found.cache}


def _join(folder: Path) -> int:
    """Joins parallel products of the graph in ``folder``; see ``fusion.py``. Returns how many there are then."""
    import onnx

    from pipeline.engines.lowering.weights import WeightFile
    from pipeline.engines.tensorrt.fusion import fuse_parallel

    model = onnx.load(str(folder / "model.onnx"), load_external_data=False)
    with WeightFile(folder / "joined.onnx") as weights:
        joined = fuse_parallel(model, folder, weights.add)
        weights.save(model, folder)
    return joined


def _dtype(inputs: BuildInputs) -> str:
    rest = inputs.engine.tensorrt.dtype
    return rest if inputs.recipe is None else f"{inputs.recipe.weights} (rest {rest})"


def _counted(structure: dict[str, Any]) -> str:
    text = f"{structure['quantized_matmuls']} MatMuls in 8 bit"
    return f"{text}, {structure['quantized_cache']} cache tensors in FP8" if structure["quantized_cache"] else text


def _version(package: str) -> str:
    import importlib.metadata

    return importlib.metadata.version(package)
