"""Engines by ``trtllm-build`` (or the LLM API), judged by what they left and not by what they said."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.engines.tensorrt_llm.documented import ENGINE_CONFIG, LOG_GPU_MEMORY, LOG_PEAK_MEMORY, LOG_TOTAL_TIME
from pipeline.engines.tensorrt_llm.flags import build_arguments, differences, effective, requested
from pipeline.engines.tensorrt_llm.memory import check_memory
from pipeline.engines.tensorrt_llm.runtime import Runtime, answer_of, explain_code, job_file, run_logged, tail
from pipeline.errors import BuildError
from pipeline.files import digest_file, digest_tree, read_json
from pipeline.params import Engine

TIMING_CACHE = "timing.cache"
NO_LLM_API_FIELDS = ("use_fused_mlp",)  # arguments of trtllm-build alone; the LLM API decides


@dataclass(frozen=True)
class Plan:
    """What is built from what. ``weights``: the quantised export, or the checkpoint. ``tokenizer``: the checkpoint's
    configuration and tokenizer as transformers 4 reads them. ``original``: the weights before quantisation."""

    weights: Path
    original: Path
    tokenizer: Path
    quantization: dict[str, Any]
    engine: Engine
    found: dict[str, Any]  # the worker's ``look``
    log: Path
    label: str

    @property
    def sm(self) -> int:
        """Of the GPU that the engine is for."""
        return int(self.found["gpus"][0]["sm"])

    @property
    def formats(self) -> tuple[str | None, str | None]:
        """quant_algo and kv_cache_quant_algo."""
        return self.quantization.get("quant_algo"), self.quantization.get("kv_cache_quant_algo")


def build_engine(plan: Plan, runtime: Runtime, target: Path) -> dict[str, Any]:
    """Writes ``target/engine`` and ``target/timing.cache``; returns what was built, for the manifest.

    Raises BuildError with the log's last lines when the engine is not whole, or not the one that was asked for.
    """
    asked = requested(plan.engine, *plan.formats, plan.sm)
    timing_in = _timing_input(plan.engine)
    plan.log.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{plan.label}.", suffix=".part", dir=target.parent) as name:
        work = Path(name)
        work.chmod(0o755)
        if plan.engine.tensorrt_llm.build == "llm-api":
            described: dict[str, Any] = {"built_by": "llm-api"}
            options = llm_api_options(plan.engine, asked, str(target.absolute() / TIMING_CACHE), timing_in)
            _by_llm_api(plan, runtime, work, target, options)
        else:
            described = {"built_by": "trtllm-build"}
            described |= convert_checkpoint(plan, runtime, work)
            described["memory"] = _memory(plan, work / "checkpoint")
            arguments = build_arguments(
                asked,
                checkpoint=str(work.absolute() / "checkpoint"),
                output=str(target.absolute() / "engine"),
                timing_out=str(target.absolute() / TIMING_CACHE),
                timing_in=None if timing_in is None else str(timing_in),
                workers=plan.engine.tensorrt_llm.tp,
            )
            described["command"] = _shown(["trtllm-build", *arguments], work, target)
            _run(plan, runtime.command("trtllm-build", *arguments))
    config = judge_engine(target / "engine", plan)
    got = effective(config, set(asked))
    differing = differences(asked, got)
    for flag, pair in sorted(differing.items()):
        print(f"{plan.label}: {flag}: asked for {pair['requested']}, the engine has {pair['effective']}", flush=True)
    return described | {
        "flags": {"requested": asked, "effective": got, "differences": differing},
        "timing_cache": {
            "input": None if timing_in is None else digest_file(timing_in),
            "output": digest_file(target / TIMING_CACHE) if (target / TIMING_CACHE).exists() else None,
        },
        "scraped": scrape(plan.log.read_text(encoding="utf-8", errors="replace")),
        "log": {"path": str(plan.log), "digest": digest_file(plan.log)},
        "engine_version": config["version"],
    }


def convert_checkpoint(plan: Plan, runtime: Runtime, work: Path) -> dict[str, Any]:
    """Writes ``work/checkpoint``, the TensorRT-LLM checkpoint, by the worker; checks it; returns what was done."""
    job = {
        "export": str(plan.weights.absolute()),
        "original": str(plan.original.absolute()),
        "older": str(plan.tokenizer.absolute()),
        "target": str((work / "checkpoint").absolute()),
        "quantization": plan.quantization,
        "dtype": plan.engine.tensorrt_llm.dtype,
        "tp": plan.engine.tensorrt_llm.tp,
    }
    with job_file(work, job) as path:
        code = run_logged(
            runtime.worker("convert", str(path)),
            plan.log,
            f"{plan.label}: checkpoint",
            plan.engine.tensorrt_llm.build_timeout_s,
        )
    said = plan.log.read_text(encoding="utf-8", errors="replace")
    done = answer_of(said, code, said, f"{plan.label}: the TensorRT-LLM checkpoint")
    check_checkpoint(work / "checkpoint", plan)
    for warning in done["warnings"]:
        print(f"{plan.label}: warning: {warning}", flush=True)
    if done["library"]["not_compared"]:
        print(f"{plan.label}: config.json not compared: {done['library']['not_compared']}", flush=True)
    return {
        "checkpoint": {"files": digest_tree(work / "checkpoint"), "requantised": done["requantised"]},
        "warnings": done["warnings"],
        "library": done["library"],
    }


def check_checkpoint(folder: Path, plan: Plan) -> None:
    """Reads back what the worker wrote. Raises BuildError when a file or a scale is missing or makes no sense."""
    import torch
    from safetensors import safe_open

    tp = plan.engine.tensorrt_llm.tp
    ranks = [folder / f"rank{rank}.safetensors" for rank in range(tp)]
    missing = [path.name for path in (folder / "config.json", *ranks) if not path.is_file() or not path.stat().st_size]
    if missing:
        left = sorted(path.name for path in folder.glob("*.pth")) if folder.exists() else []
        raise BuildError(
            f"{plan.label}: the TensorRT-LLM checkpoint has no {', '.join(missing)}"
            + (f", but {', '.join(left)}: its export failed halfway" if left else ""),
            f"see {plan.log}",
        )
    config = read_json(folder / "config.json")
    if (config["quantization"]["quant_algo"], config["quantization"]["kv_cache_quant_algo"]) != plan.formats:
        raise BuildError(
            f"{plan.label}: the checkpoint says {config['quantization']}, not {plan.formats}", "report this"
        )
    for path in ranks:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                if not name.endswith("_scaling_factor"):
                    continue
                scale = file.get_tensor(name).float()
                if not bool((torch.isfinite(scale) & (scale > 0)).all()):
                    raise BuildError(
                        f"{plan.label}: {path.name}: {name} holds zero, negative, NaN or infinite values",
                        "calibrate on data that reaches this layer, or exclude it in the recipe",
                    )


def judge_engine(folder: Path, plan: Plan) -> dict[str, Any]:
    """The engine's config.json, if the engine is whole and the one that was asked for. Raises BuildError otherwise."""
    tp = plan.engine.tensorrt_llm.tp
    wanted = [folder / "config.json", *(folder / f"rank{rank}.engine" for rank in range(tp))]
    for path in wanted:
        if not path.is_file() or path.stat().st_size == 0:
            raise BuildError(
                f"{plan.label}: no engine: {path.name} is {'empty' if path.exists() else 'missing'}; the last lines of "
                f"{plan.log}:\n{tail(plan.log)}",
                _hint(plan.log) or f"see {plan.log}",
            )
    config: dict[str, Any] = read_json(folder / "config.json")
    if unknown := sorted(ENGINE_CONFIG - config.keys()):
        raise BuildError(f"{plan.label}: the engine's config.json has no {', '.join(unknown)}", f"see {plan.log}")
    pretrained, built = config["pretrained_config"], config["build_config"]
    algos = tuple(pretrained["quantization"].get(name) for name in ("quant_algo", "kv_cache_quant_algo"))
    vocabulary = read_json(plan.tokenizer / "config.json")["vocab_size"]
    facts: Sequence[tuple[str, Any, Any, bool]] = (
        ("quantisation", plan.formats, algos, algos == plan.formats),
        ("ranks", tp, pretrained["mapping"]["world_size"], pretrained["mapping"]["world_size"] == tp),
        ("vocabulary", vocabulary, pretrained["vocab_size"], 0 <= pretrained["vocab_size"] - vocabulary < 64 * tp),
        ("batch", plan.engine.max_batch, built["max_batch_size"], built["max_batch_size"] >= plan.engine.max_batch),
        ("tokens", plan.engine.max_tokens, built["max_seq_len"], built["max_seq_len"] >= plan.engine.max_tokens),
    )
    for what, asked, got, good in facts:
        if not good:
            raise BuildError(f"{plan.label}: {what}: asked for {asked}, the engine has {got}", f"see {plan.log}")
    return config


def scrape(log: str) -> dict[str, float]:
    """Build time and peak memory from a build's log; what is not in it is left out."""
    found: dict[str, float] = {}
    if match := re.search(LOG_TOTAL_TIME, log):
        hours, minutes, seconds = map(int, match.groups())
        found["build_s"] = 3600 * hours + 60 * minutes + seconds
    if peaks := re.findall(LOG_PEAK_MEMORY, log):  # one for each rank
        found["peak_memory_mb"] = max(float(own) for own, _ in peaks)
        found["children_peak_memory_mb"] = max(float(children) for _, children in peaks)
    return found


def _run(plan: Plan, argv: Sequence[str]) -> None:
    params = plan.engine.tensorrt_llm
    code = run_logged(argv, plan.log, f"{plan.label}: engine", params.build_timeout_s)
    if code:
        raise BuildError(
            f"{plan.label}: {params.build}: {explain_code(code)}; the last lines of {plan.log}:\n{tail(plan.log)}",
            _hint(plan.log) or f"see {plan.log}",
        )


def _hint(log: Path) -> str:
    """The next step that a log's lines suggest, or nothing."""
    text = log.read_text(encoding="utf-8", errors="replace")
    if match := re.search(LOG_GPU_MEMORY, text):
        size = f" ({int(match.group(1)) / 2**30:.1f} GiB at once)" if match.group(1) else ""
        return f"the GPU's memory ran out{size}: lower engine.max_batch, .max_tokens or tensorrt_llm.max_num_tokens"
    return ""


def _by_llm_api(plan: Plan, runtime: Runtime, work: Path, target: Path, options: dict[str, Any]) -> None:
    """TensorRT-LLM converts and builds from the Hugging Face folder, in the worker."""
    from pipeline.engines.tensorrt_llm.older import write_checkpoint

    params = plan.engine.tensorrt_llm
    write_checkpoint(plan.weights, plan.tokenizer, work / "model", params.dtype)
    job = {
        "model": str((work / "model").absolute()),
        "older": str(plan.tokenizer.absolute()),
        "target": str((target / "engine").absolute()),
        "options": options,
    }
    with job_file(work, job) as path:
        _run(plan, runtime.worker("build", str(path)))


def llm_api_options(
    engine: Engine, asked: dict[str, int | str], timing_out: str, timing_in: Path | None
) -> dict[str, Any]:
    """The flags of ``trtllm-build`` as the LLM API has them: sizes, plugins as booleans and dtypes, arguments."""
    size = {name: value for name, value in asked.items() if isinstance(value, int)}
    switches = {"enable": True, "disable": False}
    plugins: dict[str, Any] = {
        name: switches.get(value, value)
        for name, value in asked.items()
        if isinstance(value, str) and name not in NO_LLM_API_FIELDS
    }
    if plugins["gemm_plugin"] is False:
        plugins["gemm_plugin"] = None  # a dtype, or none
    cache: dict[str, Any] = {"output_timing_cache": timing_out}
    if timing_in is not None:
        cache["input_timing_cache"] = str(timing_in)
    llm = {"dtype": engine.tensorrt_llm.dtype, "tensor_parallel_size": engine.tensorrt_llm.tp}
    return {"build_config": {**size, **cache}, "plugin_config": plugins, "llm": llm}


def _timing_input(engine: Engine) -> Path | None:
    """The timing cache to start from. ``trtllm-build`` ignores one that does not exist; we say so instead."""
    if engine.tensorrt_llm.timing_cache is None:
        return None
    path = Path(engine.tensorrt_llm.timing_cache).absolute()
    if not path.is_file():
        raise BuildError(
            f"{path}: no such timing cache",
            "set engine.tensorrt_llm.timing_cache to one, or to null: it only saves time",
        )
    return path


def _memory(plan: Plan, checkpoint: Path) -> dict[str, int]:
    import psutil

    ranks = sorted(checkpoint.glob("rank*.safetensors"))
    config = read_json(checkpoint / "config.json")
    return check_memory(ranks, config, plan.engine, plan.found, psutil.virtual_memory().available)


def _shown(argv: list[str], work: Path, target: Path) -> str:
    """The command for people, without the names of folders that are gone when they read it."""
    text = " ".join(argv)
    return text.replace(str(work.absolute()), "WORK").replace(str(target.absolute()), "ENGINE")
