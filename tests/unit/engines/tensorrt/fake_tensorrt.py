"""A fake ``tensorrt`` module: what our code calls, over ONNX, so that every path runs where no TensorRT does.

It compiles nothing: a plan is a zip of the graph and what was set for it. ``Runtime`` hands out ``fake.FakeEngine``
(ONNX Runtime behind TensorRT's interface). Three versions differ as the real ones do in what our code uses.
"""

from __future__ import annotations

import enum
import io
import json
import tempfile
import types
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import onnx

from pipeline.engines.tensorrt.plan import Binding, Description
from tests.unit.engines.tensorrt.fake import FakeContext, FakeDevice, FakeEngine


class _Enum(enum.Enum):
    """Like pybind11's: ``int(x)`` works, ``str(x)`` is ``Kind.NAME``."""

    def __int__(self) -> int:
        return int(self.value)


def _kind(name: str, members: Sequence[str]) -> Any:
    return _Enum(name, {member: place for place, member in enumerate(members)})


DTYPES = ["FLOAT", "HALF", "INT8", "INT32", "BOOL", "INT64", "BF16", "FP8", "UINT8"]
_ONNX = {1: "FLOAT", 10: "HALF", 3: "INT8", 6: "INT32", 7: "INT64", 9: "BOOL", 16: "BF16", 17: "FP8", 2: "UINT8"}
_LAYERS = {"MatMul": "MATRIX_MULTIPLY", "QuantizeLinear": "QUANTIZE", "DequantizeLinear": "DEQUANTIZE"}
_NUMPY = {"FLOAT": "float32", "HALF": "float16", "INT32": "int32", "INT64": "int64", "FP8": "float8_e4m3fn"}


class InspectedEngine(FakeEngine):
    """With an inspector and a profiler. Its two layers are made up."""

    LAYERS: ClassVar[list[dict[str, Any]]] = [
        {
            "Name": "up_proj + gate_proj",
            "LayerType": "gemm",
            "Inputs": [{"Name": "x", "Dimensions": [1, 128], "Format/Datatype": "Int8"}],
            "Outputs": [{"Name": "y", "Dimensions": [1, 256], "Format/Datatype": "Half"}],
            "TacticName": "sm90_xmma_gemm_i8f16_i8i32",
        },
        {"Name": "softmax", "LayerType": "SoftMax", "Inputs": [], "Outputs": [{"Format/Datatype": "Half"}]},
    ]
    MILLISECONDS: ClassVar[dict[str, float]] = {"up_proj + gate_proj": 0.25, "softmax": 0.5}

    def create_execution_context(self) -> InspectedContext:
        return InspectedContext(self)

    def create_engine_inspector(self) -> Any:
        inspector = types.SimpleNamespace(execution_context=None)
        inspector.get_engine_information = lambda _form: json.dumps({"Layers": self.LAYERS, "Bindings": []})
        return inspector


class InspectedContext(FakeContext):
    profiler: Any = None

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        session = self._engine.session
        known = {one.name: one.shape for one in session.get_inputs()}
        sizes = {
            axis: size
            for given, shape in self._shapes.items()
            for axis, size in zip(known[given], shape, strict=True)
            if isinstance(axis, str)
        }
        (shape,) = [one.shape for one in session.get_outputs() if one.name == name]
        return tuple(sizes[size] if isinstance(size, str) else size for size in shape)

    def execute_async_v3(self, stream: int) -> bool:
        done = super().execute_async_v3(stream)
        if self.profiler is not None:
            assert self.profiler.started
            for name, milliseconds in InspectedEngine.MILLISECONDS.items():
                self.profiler.report_layer_time(name, milliseconds)
        return done


def make_tensorrt(version: str, *, sms: Sequence[int] = ()) -> types.ModuleType:
    """``8.6.x`` or ``10.x``; with ``sms`` it is TensorRT for RTX, which compiles for these.

    ``module.calls`` counts deserialisations; ``module.built`` holds the configurations of all builds; ``module.device``
    is where engines run; ``module.refuse`` makes parsing (``"parse"``) or building (``"build"``) fail.
    """
    module: Any = types.ModuleType("fake_tensorrt")
    new = not version.startswith("8.")
    module.__version__ = version
    module.calls, module.built, module.device, module.refuse = 0, [], FakeDevice(), ""
    module.DataType = _kind("DataType", [name for name in DTYPES if new or name not in ("FP8", "BF16", "INT64")])
    module.LayerType = _kind("LayerType", ["MATRIX_MULTIPLY", "QUANTIZE", "DEQUANTIZE", "ELEMENTWISE"])
    flags = ["EXPLICIT_BATCH", "STRONGLY_TYPED"] if new else ["EXPLICIT_BATCH"]
    module.NetworkDefinitionCreationFlag = _kind("NetworkDefinitionCreationFlag", flags)
    module.BuilderFlag = _kind("BuilderFlag", ["FP16", "INT8", "PREFER_PRECISION_CONSTRAINTS"])
    module.MemoryPoolType = _kind("MemoryPoolType", ["WORKSPACE"])
    module.ProfilingVerbosity = _kind("ProfilingVerbosity", ["LAYER_NAMES_ONLY", "NONE", "DETAILED"])
    module.TacticSource = _kind(
        "TacticSource", ["CUBLAS", "CUBLAS_LT", "CUDNN", "EDGE_MASK_CONVOLUTIONS", "JIT_CONVOLUTIONS"]
    )
    if sms:
        module.ComputeCapability = _kind("ComputeCapability", ["CURRENT", *(f"SM{sm}" for sm in sms)])

    class ILogger:
        def __init__(self) -> None:
            self.started = True

    class Tensor:
        def __init__(self, value: Any) -> None:
            kind = value.type.tensor_type
            self.name = value.name
            self.dtype = module.DataType[_ONNX[kind.elem_type]]
            self.shape = tuple(-1 if one.dim_param else one.dim_value for one in kind.shape.dim)

    class Layer:
        num_outputs = 1

        precision: Any = None

        def __init__(self, node: Any, kind: Any) -> None:
            self.name = node.name
            self.type = module.LayerType[_LAYERS.get(node.op_type, "ELEMENTWISE")]
            kind = module.DataType.INT8 if self.type is module.LayerType.QUANTIZE else kind
            self._output = types.SimpleNamespace(dtype=kind, is_shape_tensor=False)

        def get_output(self, _place: int) -> Any:
            return self._output

        def set_output_type(self, _place: int, kind: Any) -> None:
            assert kind is self.precision

    class Network:
        def __init__(self, flags: int) -> None:
            self.flags = flags
            self.path: Path | None = None

        def load(self, path: Path) -> None:
            self.path = path
            graph = onnx.load(str(path), load_external_data=False).graph
            self.inputs, self.outputs = [Tensor(one) for one in graph.input], [Tensor(one) for one in graph.output]
            self.layers = [Layer(node, self.outputs[0].dtype) for node in graph.node]
            self.num_inputs, self.num_outputs, self.num_layers = map(len, (self.inputs, self.outputs, self.layers))

        def get_input(self, place: int) -> Tensor:
            return self.inputs[place]

        def get_output(self, place: int) -> Tensor:
            return self.outputs[place]

        def get_layer(self, place: int) -> Layer:
            return self.layers[place]

    class Profile:
        def __init__(self) -> None:
            self.shapes: dict[str, Any] = {}

        def set_shape(self, name: str, *shapes: Sequence[int]) -> None:
            assert all(a <= b <= c for a, b, c in zip(*shapes, strict=True))
            self.shapes[name] = [list(shape) for shape in shapes]

    class TimingCache:
        def __init__(self, content: bytes) -> None:
            self.content = content

        def serialize(self) -> bytes:
            return self.content + b"+"

    class Config:
        def __init__(self) -> None:
            self.flags: set[str] = set()
            self.profiles: list[Profile] = []
            self.pools: dict[str, int] = {}
            self.capabilities: dict[int, str] = {}
            self.tactics: int | None = None
            self.cache: TimingCache | None = None
            self.num_compute_capabilities = 0
            self.builder_optimization_level = 3
            self.profiling_verbosity: Any = None

        def set_flag(self, flag: Any) -> None:
            self.flags.add(flag.name)

        def set_memory_pool_limit(self, pool: Any, size: int) -> None:
            self.pools[pool.name] = size

        def set_tactic_sources(self, mask: int) -> None:
            self.tactics = mask

        def set_compute_capability(self, capability: Any, place: int) -> None:
            assert place < self.num_compute_capabilities
            self.capabilities[place] = capability.name

        def add_optimization_profile(self, profile: Profile) -> int:
            self.profiles.append(profile)
            return len(self.profiles) - 1

        def create_timing_cache(self, content: bytes) -> TimingCache | None:
            return None if content.startswith(b"foreign") else TimingCache(content)

        def set_timing_cache(self, cache: TimingCache, ignore_mismatch: bool) -> bool:
            assert ignore_mismatch is False
            self.cache = cache
            return True

        def get_timing_cache(self) -> TimingCache:
            assert self.cache is not None
            return self.cache

    class Builder:
        def __init__(self, logger: Any) -> None:
            assert logger.started
            self.logger = logger

        def create_network(self, flags: int) -> Network:
            return Network(flags)

        def create_builder_config(self) -> Config:
            return Config()

        def create_optimization_profile(self) -> Profile:
            return Profile()

        def build_serialized_network(self, network: Network, config: Config) -> bytes | None:
            module.built.append(config)
            config.network = network  # type: ignore[attr-defined]
            assert network.path is not None
            config.model = onnx.load(str(network.path))  # type: ignore[attr-defined]
            if module.refuse == "build":
                self.logger.log("Severity.ERROR", "Error Code 10: could not find any implementation for node up_proj")
                return None
            monitor = getattr(config, "progress_monitor", None)
            if monitor is not None:
                monitor.phase_start("Building engine", None, 2)
                monitor.phase_start("Timing", "Building engine", 1)
                assert monitor.step_complete("Building engine", 0)
                monitor.phase_finish("Building engine")
            what = {
                "version": version,
                "profiles": [{"shapes": profile.shapes} for profile in config.profiles],
                "bindings": [
                    {"name": one.name, "input": one in network.inputs, "dtype": _NUMPY[one.dtype.name], "shape": []}
                    for one in (*network.inputs, *network.outputs)
                ],
            }
            file = io.BytesIO()
            with zipfile.ZipFile(file, "w") as archive:
                archive.writestr("what.json", json.dumps(what))
                for path in (network.path, Path(f"{network.path}.data")):
                    archive.write(path, path.name)
            return file.getvalue()

    class OnnxParser:
        num_errors = 1

        def __init__(self, network: Network, logger: Any) -> None:
            self._network = network
            assert logger.started

        def parse_from_file(self, path: str) -> bool:
            self._network.load(Path(path))
            return module.refuse != "parse"

        def get_error(self, _place: int) -> Any:
            return types.SimpleNamespace(desc=lambda: "no importer for op FancyOp", node_name=lambda: "fancy_1")

    class Runtime:
        def __init__(self, logger: Any) -> None:
            self._logger = logger

        def deserialize_cuda_engine(self, plan: bytes) -> FakeEngine | None:
            module.calls += 1
            try:
                archive = zipfile.ZipFile(io.BytesIO(plan))
            except zipfile.BadZipFile:
                self._logger.log("Severity.ERROR", "the plan is corrupt")
                return None
            folder = Path(tempfile.mkdtemp(prefix="fake-plan-"))
            archive.extractall(folder)
            what = json.loads((folder / "what.json").read_text())
            bindings = [Binding(**binding) for binding in what["bindings"]]
            description = Description("tensorrt", version, [], what["profiles"], bindings, {}, {})
            return InspectedEngine(folder, description, module.device)

    class IProfiler:
        def __init__(self) -> None:
            self.started = True

    module.LayerInformationFormat = _kind("LayerInformationFormat", ["ONELINE", "JSON"])
    for kind in (ILogger, IProfiler, Builder, OnnxParser, Runtime):
        setattr(module, kind.__name__, kind)
    if new:

        class IProgressMonitor:
            def __init__(self) -> None:
                pass

        module.IProgressMonitor = IProgressMonitor
    return module  # type: ignore[no-any-return]
