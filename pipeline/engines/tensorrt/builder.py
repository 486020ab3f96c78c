"""ONNX into a plan: network, profiles, limits, timing cache, progress; for every version of both libraries.

Imports nothing heavy (see ``__init__.py``). The build log keeps what the library says; it holds times, so it is no part
of an engine.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from pipeline.engines.tensorrt.library import Library
from pipeline.engines.tensorrt.plan import DTYPES, PLAN, Binding, Description
from pipeline.engines.tensorrt.profiles import make_profiles
from pipeline.engines.tensorrt.weak import set_precisions
from pipeline.errors import BuildError
from pipeline.files import atomic_file

_GIB = 2**30
_SHOWN = 3  # of the library's own errors


@dataclass(frozen=True)
class Settings:
    """``sm``: the compute capabilities to compile for; a library that only builds for the GPU at hand takes that one.
    ``buckets``: batch sizes to tune steps for. ``workspace_gib`` 0: all of the GPU. ``tactics``: names of the
    library's tactic sources, None: its own choice. ``half``: float16 where a library without strong typing chooses.
    ``steps_only``: no profile for prompts, which are then read token by token; for measuring steps sooner."""

    max_batch: int
    max_tokens: int
    sm: tuple[str, ...]
    buckets: tuple[int, ...] = ()
    optimization_level: int = 3
    workspace_gib: float = 0
    timing_cache: Path | None = None
    log: Path | None = None
    tactics: tuple[str, ...] | None = None
    half: bool = True
    steps_only: bool = False
    progress: bool = True


@dataclass
class Built:
    """A plan's description and what differs between equal builds: seconds, peak memory, the timing cache's digests."""

    description: Description
    record: dict[str, Any] = field(default_factory=dict)


def build_plan(library: Library, graph: Path, target: Path, cache: dict[str, Any], settings: Settings) -> Built:
    """Compiles the ONNX file ``graph`` into the plan of the folder ``target``. ``cache``: what its export returned.

    Raises BuildError with the library's own words when it refuses the graph or finds no kernels.
    """
    begin = time.monotonic()
    trt = library.trt
    with _log(settings.log) as log:
        logger = library.logger(log.write)
        builder = trt.Builder(logger)
        network = builder.create_network(_network_flags(library))
        parser = trt.OnnxParser(network, logger)
        if not parser.parse_from_file(str(graph)):
            errors = [_words(parser.get_error(place)) for place in range(parser.num_errors)]
            raise BuildError(f"{library.label} does not take the graph: {'; '.join(errors[:_SHOWN])}", _report(log))
        dimensions = _dimensions(network, graph)
        profiles = make_profiles(
            {name: dimensions[name] for name in _names(network.get_input, network.num_inputs)},
            max_batch=settings.max_batch,
            max_tokens=settings.max_tokens,
            buckets=settings.buckets,
        )
        if settings.steps_only:
            profiles = [one for one in profiles if one.name != "prefill"]
        config = _config(library, builder, network, settings)
        for profile in profiles:
            own = builder.create_optimization_profile()
            for name, shapes in profile.shapes.items():
                own.set_shape(name, *shapes)
            if config.add_optimization_profile(own) < 0:
                raise BuildError(f"{library.label} refuses the profile {profile.name}: {log.last()}", _report(log))
        kept = settings.timing_cache if library.timing_cache else None
        before = _load_timing_cache(library, config, kept)
        with _progress(library, config, settings.progress):
            plan = builder.build_serialized_network(network, config)
        if plan is None:
            raise BuildError(f"{library.label} finds no engine for this graph: {log.last()}", _report(log))
        (target / PLAN).write_bytes(memoryview(plan))
        after = _save_timing_cache(config, kept)
        description = Description(
            library=library.name,
            version=library.version,
            sm=list(settings.sm),
            profiles=[profile.plain() for profile in profiles],
            bindings=_bindings(network, dimensions),
            cache=cache,
            limits={"max_batch": settings.max_batch, "max_tokens": settings.max_tokens},
            layers=_layers(network),
            summary={"optimization_level": settings.optimization_level, "workspace_gib": settings.workspace_gib},
        )
    record = {
        "build_s": round(time.monotonic() - begin, 1),
        "peak_memory_mib": _peak_mib(),
        "timing_cache": None if kept is None else {"before": before, "after": after},
    }
    return Built(description, record)


def _network_flags(library: Library) -> int:
    flags = library.trt.NetworkDefinitionCreationFlag
    if library.strongly_typed:
        return 1 << int(flags.STRONGLY_TYPED)
    return 1 << int(flags.EXPLICIT_BATCH)


def _config(library: Library, builder: Any, network: Any, settings: Settings) -> Any:
    trt, config = library.trt, builder.create_builder_config()
    config.builder_optimization_level = settings.optimization_level
    if settings.workspace_gib:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, int(settings.workspace_gib * _GIB))
    if hasattr(trt.ProfilingVerbosity, "DETAILED"):
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # for `enginegate show`; costs no speed
    sharing = getattr(getattr(trt, "PreviewFeature", None), "PROFILE_SHARING_0806", None)
    if sharing is not None:  # the decoder has a context for each shape of a step; newer libraries allow it anyway
        config.set_preview_feature(sharing, True)
    if not library.strongly_typed:
        set_precisions(library, network, config, half=settings.half)
    if settings.tactics is not None:
        mask = 0
        for name in settings.tactics:
            mask |= 1 << int(getattr(trt.TacticSource, name))
        config.set_tactic_sources(mask)
    if library.targets:
        config.num_compute_capabilities = len(settings.sm)
        for place, sm in enumerate(settings.sm):
            config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{sm}"), place)
    return config


def _load_timing_cache(library: Library, config: Any, path: Path | None) -> str | None:
    """Gives the builder its timing cache; returns its digest, None for a new one."""
    if path is None:
        return None
    content = path.read_bytes() if path.exists() else b""
    cache = config.create_timing_cache(content)
    if cache is None or not config.set_timing_cache(cache, False):
        raise BuildError(
            f"{path}: no timing cache of {library.label} on this GPU", "delete it, or set engine.tensorrt.timing_cache"
        )
    return _digest(content) if content else None


def _save_timing_cache(config: Any, path: Path | None) -> str | None:
    if path is None:
        return None
    content = bytes(memoryview(config.get_timing_cache().serialize()))
    with atomic_file(path) as part:
        part.write_bytes(content)
    return _digest(content)


def _digest(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()


# What the network is --------------------------------------------------------------------------------------------------


def _names(get: Any, count: int) -> list[str]:
    return [str(get(place).name) for place in range(count)]


def _layers_of(network: Any) -> Iterator[Any]:
    return (network.get_layer(place) for place in range(network.num_layers))


def _dimensions(network: Any, graph: Path) -> dict[str, list[int | str]]:
    """Input or output name -> sizes, and names of the dynamic axes, as the graph has them."""
    try:
        import onnx
    except ImportError:  # the library knows the names too, but only those of inputs
        ends = [network.get_input(place) for place in range(network.num_inputs)]
        ends += [network.get_output(place) for place in range(network.num_outputs)]
        return {
            end.name: [
                size if size >= 0 else end.get_dimension_name(axis) or "?" for axis, size in enumerate(end.shape)
            ]
            for end in ends
        }
    model = onnx.load(str(graph), load_external_data=False)
    return {
        value.name: [one.dim_param or int(one.dim_value) for one in value.type.tensor_type.shape.dim]
        for value in (*model.graph.input, *model.graph.output)
    }


def _bindings(network: Any, dimensions: Mapping[str, Sequence[int | str]]) -> list[Binding]:
    ends = [(network.get_input(place), True) for place in range(network.num_inputs)]
    ends += [(network.get_output(place), False) for place in range(network.num_outputs)]
    return [Binding(end.name, given, _dtype(end), list(dimensions[end.name])) for end, given in ends]


def _dtype(tensor: Any) -> str:
    kind = str(tensor.dtype).rpartition(".")[2]
    return DTYPES.get(kind, kind.lower())


def _layers(network: Any) -> dict[str, int]:
    """Layers of the network, before kernels are chosen, by operation and type: ``matrix_multiply float16``."""
    counts: Counter[str] = Counter()
    for layer in _layers_of(network):
        if layer.num_outputs:
            counts[f"{str(layer.type).rpartition('.')[2].lower()} {_dtype(layer.get_output(0))}"] += 1
    return dict(sorted(counts.items()))


# What people see ------------------------------------------------------------------------------------------------------


class _Log:
    """The build log: everything into a file, the last errors also in memory."""

    def __init__(self, file: TextIO | None) -> None:
        self.path = None if file is None else file.name
        self._file = file
        self._errors: deque[str] = deque(maxlen=_SHOWN)

    def write(self, severity: str, message: str) -> None:
        if severity in ("ERROR", "INTERNAL_ERROR"):
            self._errors.append(message.strip())
        if self._file is not None and severity != "VERBOSE":
            self._file.write(f"{severity:<8} {message}\n")

    def last(self) -> str:
        """The library's last errors."""
        return "; ".join(self._errors) or "it gives no reason"


@contextlib.contextmanager
def _log(path: Path | None) -> Iterator[_Log]:
    if path is None:
        yield _Log(None)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        yield _Log(file)


def _report(log: _Log) -> str:
    where = f"the build log is {log.path}; " if log.path else ""
    return f"{where}docs/tensorrt.md lists what each version takes"


def _words(error: Any) -> str:
    node = f" ({error.node_name()})" if hasattr(error, "node_name") and error.node_name() else ""
    return f"{error.desc()}{node}"


@contextlib.contextmanager
def _progress(library: Library, config: Any, wanted: bool) -> Iterator[None]:
    """One bar for the builder's outermost phase, named after what it is doing; where the library tells it."""
    if not wanted or not hasattr(library.trt, "IProgressMonitor"):
        yield
        return
    from tqdm import tqdm

    monitor_type = library.trt.IProgressMonitor

    class Monitor(monitor_type):  # type: ignore[misc,valid-type]
        """Called from the builder's threads."""

        def __init__(self) -> None:
            monitor_type.__init__(self)
            self.bars: dict[str, Any] = {}

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            """A phase of so many steps begins."""
            if parent is None:
                self.bars[phase] = tqdm(total=steps, desc=phase, unit="step", mininterval=2)
            else:
                for bar in self.bars.values():
                    bar.set_postfix_str(phase, refresh=False)

        def step_complete(self, phase: str, step: int) -> bool:
            """A step is done; True: go on."""
            if phase in self.bars:
                self.bars[phase].update(step + 1 - self.bars[phase].n)
            return True

        def phase_finish(self, phase: str) -> None:
            """A phase is done."""
            if phase in self.bars:
                self.bars.pop(phase).close()

    monitor = Monitor()
    config.progress_monitor = monitor
    try:
        yield
    finally:
        for bar in monitor.bars.values():
            bar.close()


def _peak_mib() -> int | None:
    """The most memory that this process has had, in MiB; it is that of the build, the largest part of it."""
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
