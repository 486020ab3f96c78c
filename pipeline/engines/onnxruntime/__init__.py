"""ONNX Runtime on the CPU: the embedded default backend, which runs anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.engines import BuildInputs, refuse_recipe
from pipeline.errors import BuildError

if TYPE_CHECKING:
    from pipeline.engines.onnxruntime.executor import OrtExecutor
    from pipeline.params import Engine
    from pipeline.quantize.recipes import Recipe


def preflight(recipe: Recipe | None, engine: Engine, platform: dict[str, Any]) -> None:  # noqa: ARG001
    """Refuses recipes without integer kernels on CPUs; see ``pipeline.engines.Backend``."""
    refuse_recipe(recipe, "onnxruntime")


def plain_dtype(engine: Engine) -> str:  # noqa: ARG001
    """CPUs have no fast float16."""
    return "float32"


def compile_engine(inputs: BuildInputs, target: Path) -> dict[str, Any]:
    """Writes ``model.onnx`` and its data into ``target``; see ``pipeline.engines.Backend``.

    Raises BuildError when a quantised layer did not become an int8 kernel.
    """
    import onnx
    import onnxruntime

    from pipeline.engines.lowering.qdq import check_untouched, insert_qdq
    from pipeline.engines.lowering.quantized import QuantizedCheckpoint
    from pipeline.engines.lowering.verify import verify
    from pipeline.engines.lowering.weights import save_graph
    from pipeline.engines.onnxruntime.kernels import lower_for_cpu

    model = onnx.load(str(inputs.plain / "model.onnx"), load_external_data=False)
    inserted = lowered = 0
    if inputs.quantized is not None:
        with QuantizedCheckpoint(inputs.quantized / "checkpoint") as checkpoint:
            check_untouched(model, inputs.plain, checkpoint)
            inserted = insert_qdq(model, checkpoint).layers
        verify(model, inputs.plain, inputs.quantized / "checkpoint", inputs.recipe)
        lowered = lower_for_cpu(model)
        if lowered != inserted:
            raise BuildError(f"only {lowered} of {inserted} quantised layers run in int8", "report this graph")
    save_graph(model, target / "model.onnx", inputs.plain)
    return {
        "summary": f"{lowered} MatMuls in int8",
        "int8_matmuls": lowered,
        "versions": {"onnx": onnx.__version__, "onnxruntime": onnxruntime.__version__},
    }


def open_executor(folder: Path, *, max_batch: int, max_tokens: int, threads: int) -> OrtExecutor:
    """Opens an engine folder for decoding; ``threads`` 0: one for each core."""
    from pipeline.engines.onnxruntime.executor import OrtExecutor

    return OrtExecutor(folder, max_batch=max_batch, max_tokens=max_tokens, threads=threads)
