"""``params.yaml``: everything about a run except what is allowed to be lost (that is ``policy.yaml``)."""

from __future__ import annotations

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
    batch_tokens: int = 8192
    answers: bool = True  # calibrate on prompt and reference answer: decoding sees answers too

    def __post_init__(self) -> None:
        _require(self.samples >= 1, "samples: must be at least 1")
        _require(1 <= self.strata <= 1000, "strata: must be between 1 (none) and 1000")
        _require(self.max_tokens >= 8, "max_tokens: must be at least 8")
        _require(self.batch_tokens >= self.max_tokens, "batch_tokens: must be at least calib.max_tokens")


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
class Engine:
    """What is built and its limits."""

    __pydantic_config__ = STRICT
    backend: Literal["onnxruntime", "tensorrt"] = "onnxruntime"
    max_batch: int = 16
    max_tokens: int = 2048  # prompt and answer together
    threads: int = 0  # 0: one for each core
    tensorrt: TensorRT = field(default_factory=TensorRT)

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
    concurrency: int = 32
    start_timeout_s: int = 600
    extra_args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require(self.concurrency >= 1, "concurrency: must be at least 1")
        _require(self.start_timeout_s >= 1, "start_timeout_s: must be at least 1")


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
    seed: int = 17

    def __post_init__(self) -> None:
        _require(len(self.recipes) >= 1, "recipes: name at least one")
        _require(len(set(self.recipes)) == len(self.recipes), "recipes: a name stands twice")
        _require(
            self.engine.max_tokens > self.eval.max_new_tokens, "engine.max_tokens: must exceed eval.max_new_tokens"
        )


def load_params(path: Path = PARAMS_FILE) -> Params:
    """Reads and checks ``params.yaml``. Raises ConfigError with file, line and key."""
    return load_typed(path, Params)
