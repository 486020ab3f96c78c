"""``params.yaml``: everything about a run except what is allowed to be lost (that is ``policy.yaml``)."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pipeline.config import STRICT, load_typed

PARAMS_FILE = Path("params.yaml")
DEMO = "demo"


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True)
class Model:
    """The checkpoint: ``demo``, a local folder, or a hub id with a pinned ``revision``."""

    __pydantic_config__ = STRICT
    checkpoint: str = DEMO
    revision: str | None = None
    adapter: str | None = None  # a LoRA adapter folder to merge at intake
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Columns:
    """Which columns of the data hold what. ``id`` and ``group`` may be absent (null)."""

    __pydantic_config__ = STRICT
    source: str = "source"
    target: str = "target"
    id: str | None = "id"
    group: str | None = "group"


@dataclass(frozen=True)
class Data:
    """Where rows come from: ``demo``, a local json, jsonl, parquet or csv file, a hub id, or a prompt log."""

    __pydantic_config__ = STRICT
    source: str = DEMO
    name: str | None = None  # the configuration of a hub data set
    revision: str | None = None
    calib_split: str = "calib"
    eval_split: str = "eval"
    calib_file: str | None = None  # local files: one file a set, instead of splits
    eval_file: str | None = None
    calib_log: str | None = None  # calibrate on real traffic: JSON lines of OpenAI-style requests; a glob is allowed
    profile_log: str | None = None  # a prompt log whose prompt lengths the calibration set takes
    log_bad_lines: float = 0.01  # the share of a log's lines that may be unusable
    redact: tuple[str, ...] = ()  # of the calibration texts, in order: email, phone, digits, or module:function
    max_rows: int | None = None  # read at most so many rows of a set; the card says so
    licence: str | None = None
    columns: Columns = field(default_factory=Columns)

    def __post_init__(self) -> None:
        _require(0 <= self.log_bad_lines < 1, "log_bad_lines: must be a share from 0 up to, not including, 1")
        _require(self.max_rows is None or self.max_rows >= 1, "max_rows: must be at least 1, or null")
        known = ("email", "phone", "digits")
        for name in self.redact:
            place, _, function = name.partition(":")
            _require(
                name in known
                or (bool(function) and all(part.isidentifier() for part in (*place.split("."), function))),
                f"redact: {name!r} is none of {', '.join(known)} and no module:function",
            )


@dataclass(frozen=True)
class Prompt:
    """How a row becomes a prompt; ``user`` holds ``{source}``."""

    __pydantic_config__ = STRICT
    template: Literal["chat", "plain"] = "chat"
    user: str = "{source}"
    system: str | None = None

    def __post_init__(self) -> None:
        _require("{source}" in self.user, "user: the text must hold {source}, the row's source text")


@dataclass(frozen=True)
class Calib:
    """The calibration sample."""

    __pydantic_config__ = STRICT
    samples: int = 10_000
    strata: int = 20  # length bands in which the sample has the shares of the evaluation set; 1: none
    max_tokens: int = 2048  # longer samples are left out and counted, never cut
    batch_tokens: int | None = None  # of one forward pass; null: by device and model width
    answers: bool = True  # calibrate on prompt and reference answer: decoding sees answers too
    processes: int | Literal["auto"] = "auto"  # ranks that share the work; auto: one for each GPU
    device_map: Literal["auto"] | None = None  # auto: one model over all GPUs and the host, in one process
    save_every_s: float = 30.0  # a killed calibration loses no more than this
    wait_s: float = 1800.0  # how long the ranks wait for the slowest

    def __post_init__(self) -> None:
        _require(self.samples >= 1, "samples: must be at least 1")
        _require(1 <= self.strata <= 1000, "strata: must be between 1 (none) and 1000")
        _require(self.max_tokens >= 8, "max_tokens: must be at least 8")
        _require(
            self.batch_tokens is None or self.batch_tokens >= self.max_tokens,
            "batch_tokens: must be at least calib.max_tokens, or null",
        )
        _require(self.processes == "auto" or self.processes >= 1, "processes: must be at least 1, or auto")
        _require(
            self.device_map is None or self.processes in ("auto", 1),
            "processes: must be 1 or auto with calib.device_map: one model takes all GPUs",
        )
        _require(self.save_every_s >= 0, "save_every_s: must not be negative")
        _require(self.wait_s > 0, "wait_s: must be above 0")

    def process_count(self, gpus: int) -> int:
        """How many processes calibrate together on a machine with so many GPUs."""
        if self.device_map is not None:
            return 1
        return max(1, gpus) if self.processes == "auto" else self.processes


@dataclass(frozen=True)
class Eval:
    """The evaluation set: the same items for every arm."""

    __pydantic_config__ = STRICT
    samples: int = 1000
    max_words: int | None = None  # leave out items with a longer source
    max_new_tokens: int = 256
    scored: int = 200  # items whose reference answer every arm scores token by token; 0: none

    def __post_init__(self) -> None:
        _require(self.samples >= 1, "samples: must be at least 1")
        _require(self.max_words is None or self.max_words >= 1, "max_words: must be at least 1, or null")
        _require(self.max_new_tokens >= 1, "max_new_tokens: must be at least 1")
        _require(self.scored >= 0, "scored: must be 0 (none) or more")


@dataclass(frozen=True)
class TensorRT:
    """How the backend ``tensorrt`` compiles."""

    __pydantic_config__ = STRICT
    library: Literal["auto", "tensorrt", "tensorrt_rtx"] = "auto"
    dtype: Literal["float16", "float32"] = "float16"  # of what is not quantised
    sm: tuple[int, ...] = ()  # compile ahead of time for these GPUs; empty: for the one at hand
    decode_batches: tuple[int, ...] = (1, 8)  # batch sizes that steps are tuned for, beside max_batch
    join_linears: bool = False  # one product for layers that read one input (q, k and v; gate and up)
    optimization_level: int = 3
    workspace_gib: float = 0  # scratch memory that a kernel may ask for; 0: no limit
    timing_cache: str | None = ".cache/tensorrt/timing.cache"  # kernel timings, read and written; null: none

    def __post_init__(self) -> None:
        _require(all(50 <= sm <= 199 for sm in self.sm), "sm: compute capabilities without a dot, such as 89")
        _require(len(set(self.sm)) == len(self.sm), "sm: one stands twice")
        _require(all(batch >= 1 for batch in self.decode_batches), "decode_batches: must be at least 1")
        _require(0 <= self.optimization_level <= 5, "optimization_level: must be between 0 and 5")
        _require(self.workspace_gib >= 0, "workspace_gib: must be 0 (no limit) or more")


@dataclass(frozen=True)
class Vllm:
    """How backend ``vllm`` serves an engine. The program and its environment are the baseline's: one vLLM, two arms."""

    __pydantic_config__ = STRICT
    dtype: Literal["auto", "float16", "bfloat16", "float32"] = (
        "auto"  # auto: as the baseline; bfloat16 with an FP8 cache
    )
    tensor_parallel_size: int = 1  # GPUs that share one engine
    extra_args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require(self.tensor_parallel_size >= 1, "tensor_parallel_size: must be at least 1")


@dataclass(frozen=True)
class TensorRTLLM:
    """Where TensorRT-LLM lives (an environment of its own), and how its engines are built and served."""

    __pydantic_config__ = STRICT
    python: str = ".venv-trtllm/bin/python"  # of a virtual environment; its programs are beside it
    container: str | None = None  # instead: `docker run ... IMAGE`; {project}, {uid}, {gid} are filled in
    env: dict[str, str] = field(default_factory=dict)
    profile: Literal["auto", "engine", "pytorch"] = "auto"  # auto: engine where the installed version has it
    build: Literal["trtllm-build", "llm-api"] = "trtllm-build"
    dtype: Literal["float16", "bfloat16"] = "float16"  # of what is not quantised
    tp: int = 1  # GPUs that an engine is cut for
    max_num_tokens: int = 8192  # tokens of all requests in one pass
    timing_cache: str | None = None  # a timing cache to start from
    build_timeout_s: int = 7200
    memory_fraction: float = 0.9  # of the GPU memory left over by the weights, for the KV cache
    block_reuse: bool = False  # between requests; the baseline has it off too

    def __post_init__(self) -> None:
        _require(self.tp >= 1, "tp: must be at least 1")
        _require(self.max_num_tokens >= 32, "max_num_tokens: must be at least 32 (a block of the KV cache)")
        _require(self.build_timeout_s >= 1, "build_timeout_s: must be at least 1")
        _require(0 < self.memory_fraction < 1, "memory_fraction: must be between 0 and 1")


@dataclass(frozen=True)
class Engine:
    """What is built and its limits."""

    __pydantic_config__ = STRICT
    backend: Literal["onnxruntime", "tensorrt", "tensorrt_llm", "vllm"] = "onnxruntime"
    max_batch: int = 16
    max_tokens: int = 2048  # prompt and answer together
    threads: int = 0  # 0: one for each core
    tensorrt: TensorRT = field(default_factory=TensorRT)
    vllm: Vllm = field(default_factory=Vllm)
    tensorrt_llm: TensorRTLLM = field(default_factory=TensorRTLLM)

    def __post_init__(self) -> None:
        _require(1 <= self.max_batch <= 1024, "max_batch: must be between 1 and 1024")
        _require(self.max_tokens >= 16, "max_tokens: must be at least 16")
        _require(self.threads >= 0, "threads: must be 0 (one for each core) or more")


@dataclass(frozen=True)
class Baseline:
    """The FP16 baseline: ``vllm serve`` from its own environment, or a ``url`` that already serves the model."""

    __pydantic_config__ = STRICT
    vllm: str = ".venv-vllm/bin/vllm"
    url: str | None = None
    dtype: Literal["auto", "float16", "bfloat16", "float32"] = "auto"  # auto: float16, on a CPU float32
    tensor_parallel_size: int = 1  # GPUs that share the model
    concurrency: int = 32
    start_timeout_s: int = 600
    extra_args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require(self.tensor_parallel_size >= 1, "tensor_parallel_size: must be at least 1")
        _require(self.concurrency >= 1, "concurrency: must be at least 1")
        _require(self.start_timeout_s >= 1, "start_timeout_s: must be at least 1")


@dataclass(frozen=True)
class Serving:
    """Where and how often servers run. Nothing here changes an answer, so no stage but the load test depends on it."""

    __pydantic_config__ = STRICT
    replicas: int = 1  # servers of an engine, each on GPUs of its own; the client asks them in turn

    def __post_init__(self) -> None:
        _require(1 <= self.replicas <= 64, "replicas: must be between 1 and 64")


@dataclass(frozen=True)
class Sweep:
    """A closed loop at each of these numbers of requests in flight."""

    __pydantic_config__ = STRICT
    concurrency: tuple[int, ...] = (1, 4, 16, 64)
    seconds: float = 30

    def __post_init__(self) -> None:
        _require(len(self.concurrency) >= 1, "concurrency: name at least one")
        _require(all(slots >= 1 for slots in self.concurrency), "concurrency: must be at least 1")
        _require(len(set(self.concurrency)) == len(self.concurrency), "concurrency: a number stands twice")
        _require(self.seconds > 0, "seconds: must be more than 0")


@dataclass(frozen=True)
class Rates:
    """An open loop at each of these rates."""

    __pydantic_config__ = STRICT
    requests_per_s: tuple[float, ...] = (10,)
    seconds: float = 60

    def __post_init__(self) -> None:
        _require(len(self.requests_per_s) >= 1, "requests_per_s: name at least one")
        _require(all(rate > 0 for rate in self.requests_per_s), "requests_per_s: must be more than 0")
        _require(len(set(self.requests_per_s)) == len(self.requests_per_s), "requests_per_s: a rate stands twice")
        _require(self.seconds > 0, "seconds: must be more than 0")


@dataclass(frozen=True)
class Spike:
    """A rate that steps up and back; ``scale`` makes the same shape smaller."""

    __pydantic_config__ = STRICT
    base: float = 150  # requests a second
    peak: float = 3500
    scale: float = 1.0
    before_s: float = 10
    peak_s: float = 5
    after_s: float = 30

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            _require(value > 0, f"{name}: must be more than 0")
        _require(self.peak > self.base, "peak: must be more than base")


@dataclass(frozen=True)
class Replay:
    """A trace that is replayed: a JSONL file with a ``timestamp`` a row."""

    __pydantic_config__ = STRICT
    file: str | None = None
    unit: Literal["s", "ms"] = "s"
    speed: float = 1.0

    def __post_init__(self) -> None:
        _require(self.speed > 0, "speed: must be more than 0")


@dataclass(frozen=True)
class Bench:
    """Load on the baseline and the engines; without ``kinds`` there is none."""

    __pydantic_config__ = STRICT
    kinds: tuple[Literal["sweep", "constant", "poisson", "spike", "replay"], ...] = ()
    engines: tuple[str, ...] | None = None  # recipes to bench beside the baseline; null: all
    repeats: int = 3  # each on fresh servers, the arms in alternating order
    new_tokens: int = 64  # of each answer, exactly
    warmup: int = 16  # requests before each load that are not counted
    timeout_s: float = 60  # a request that takes longer is a failure
    max_lag_ms: float = 5  # a client that lags more (99th percentile) makes the run invalid
    workers: int = 0  # client processes; 0: as many as the load asks for
    telemetry_s: float = 0.5  # between two samples of the server
    sweep: Sweep = field(default_factory=Sweep)
    constant: Rates = field(default_factory=Rates)
    poisson: Rates = field(default_factory=Rates)
    spike: Spike = field(default_factory=Spike)
    replay: Replay = field(default_factory=Replay)

    def __post_init__(self) -> None:
        _require(len(set(self.kinds)) == len(self.kinds), "kinds: a kind stands twice")
        _require("replay" not in self.kinds or self.replay.file is not None, "replay.file: name the trace")
        _require(self.repeats >= 1, "repeats: must be at least 1")
        _require(self.new_tokens >= 2, "new_tokens: must be at least 2, or there is no time per token")
        _require(self.warmup >= 0, "warmup: must be 0 or more")
        for name in ("timeout_s", "max_lag_ms", "telemetry_s"):
            _require(getattr(self, name) > 0, f"{name}: must be more than 0")
        _require(0 <= self.workers <= 64, "workers: must be between 0 (as many as needed) and 64")


@dataclass(frozen=True)
class Params:
    """All of ``params.yaml``."""

    __pydantic_config__ = STRICT
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    prompt: Prompt = field(default_factory=Prompt)
    calib: Calib = field(default_factory=Calib)
    eval: Eval = field(default_factory=Eval)
    recipes: tuple[str, ...] = ("int8_sq", "int8_mixed")
    engine: Engine = field(default_factory=Engine)
    baseline: Baseline = field(default_factory=Baseline)
    serving: Serving = field(default_factory=Serving)
    launcher: str = ""  # words before the command of a GPU stage: srun ..., docker run ...
    bench: Bench = field(default_factory=Bench)
    seed: int = 17

    def __post_init__(self) -> None:
        try:
            shlex.split(self.launcher)
        except ValueError as error:
            raise ValueError(f"launcher: {error}") from error
        _require(len(self.recipes) >= 1, "recipes: name at least one")
        _require(len(set(self.recipes)) == len(self.recipes), "recipes: a name stands twice")
        _require(
            self.engine.max_tokens > self.eval.max_new_tokens, "engine.max_tokens: must exceed eval.max_new_tokens"
        )
        unknown = set(self.bench.engines or ()) - set(self.recipes)
        _require(not unknown, f"bench.engines: {', '.join(sorted(unknown))} is not in recipes")
        _require(
            self.engine.backend != "tensorrt_llm" or self.eval.scored == 0,
            "eval.scored: must be 0 with engine.backend tensorrt_llm: trtllm-serve scores no prompts",
        )


def load_params(path: Path = PARAMS_FILE) -> Params:
    """Reads and checks ``params.yaml``. Raises ConfigError with file, line and key."""
    return load_typed(path, Params)
