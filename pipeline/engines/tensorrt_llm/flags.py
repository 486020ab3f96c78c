"""What ``trtllm-build`` is told, from one table, and what it made of it.

``build()`` rewrites some flags without a word (documented.py has the sources), so the table asks for what stands
and ``differences`` shows what an engine's config.json says otherwise.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pipeline.errors import BuildError
from pipeline.params import Engine

FP8_SM = 89


@dataclass(frozen=True)
class Plugins:
    """Plugin flags, in the words of ``trtllm-build``."""

    gemm_plugin: str
    use_paged_context_fmha: str
    use_fp8_context_fmha: str
    use_fused_mlp: str


# (quant_algo, kv_cache_quant_algo) -> flags.
# gemm_plugin: for GEMMs in high precision; documented as off for FP8. FP8 context attention needs an FP8 cache with
# paged attention, and then cannot be off. A paged context cannot read an INT8 cache, nor an FP8 one without FP8
# weights. use_fused_mlp is forced off for every quantisation but FP8.
PLUGINS: dict[tuple[str | None, str | None], Plugins] = {
    (None, None): Plugins("auto", "enable", "disable", "enable"),
    ("W8A8_SQ_PER_CHANNEL", None): Plugins("auto", "enable", "disable", "disable"),
    ("W8A8_SQ_PER_CHANNEL", "INT8"): Plugins("auto", "disable", "disable", "disable"),
    ("W8A8_SQ_PER_CHANNEL", "FP8"): Plugins("auto", "disable", "disable", "disable"),
    ("W4A16_AWQ", None): Plugins("auto", "enable", "disable", "disable"),
    ("W4A16_AWQ", "INT8"): Plugins("auto", "disable", "disable", "disable"),
    ("W4A16_AWQ", "FP8"): Plugins("auto", "disable", "disable", "disable"),
    ("FP8", None): Plugins("disable", "enable", "disable", "enable"),
    ("FP8", "FP8"): Plugins("disable", "enable", "enable", "enable"),
}


def plugin_flags(quant_algo: str | None, kv_algo: str | None, sm: int) -> Plugins:
    """The flags of a quantisation on a GPU. Raises BuildError for a pair that is not in the table."""
    found = PLUGINS.get((quant_algo, kv_algo))
    if found is None:
        raise BuildError(
            f"no build flags are known for {quant_algo or 'FP16'} with a KV cache in {kv_algo or 'FP16'}",
            "take the recipe out of `recipes` in params.yaml",
        )
    if found.use_fp8_context_fmha == "enable" and sm < FP8_SM:
        raise BuildError(f"FP8 attention needs SM {FP8_SM}, this is SM {sm}", "use an INT8 recipe")
    return found


def sizes(engine: Engine) -> dict[str, int]:
    """Every size of an engine; none is left to a default, which are made for other machines (batch 2048)."""
    every = engine.max_batch * engine.max_tokens
    return {
        "max_batch_size": engine.max_batch,
        "max_input_len": engine.max_tokens,
        "max_seq_len": engine.max_tokens,
        "max_num_tokens": min(every, max(engine.tensorrt_llm.max_num_tokens, engine.max_tokens)),
        "max_beam_width": 1,
    }


def requested(engine: Engine, quant_algo: str | None, kv_algo: str | None, sm: int) -> dict[str, int | str]:
    """Everything that shapes the engine, by flag name without dashes."""
    fixed = {"context_fmha": "enable", "remove_input_padding": "enable", "multiple_profiles": "disable"}
    return {**sizes(engine), **asdict(plugin_flags(quant_algo, kv_algo, sm)), **fixed}


def build_arguments(
    flags: dict[str, int | str], *, checkpoint: str, output: str, timing_out: str, timing_in: str | None, workers: int
) -> list[str]:
    """The arguments of ``trtllm-build``."""
    paths = {"checkpoint_dir": checkpoint, "output_dir": output, "output_timing_cache": timing_out}
    if timing_in is not None:
        paths["input_timing_cache"] = timing_in
    every: dict[str, Any] = {**paths, "workers": workers, "log_level": "info", **flags}
    return [word for name, value in every.items() for word in (f"--{name}", str(value))]


def effective(config: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """What an engine's config.json says of these flags; one that is recorded nowhere is left out."""
    recorded = config["build_config"]
    every = {**recorded.get("plugin_config", {}), **recorded}
    return {name: every[name] for name in sorted(names) if name in every}


def differences(asked: dict[str, int | str], got: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Flags that the engine has otherwise than asked for. ``auto`` that became a dtype is no difference."""
    found = {}
    for name, value in got.items():
        same = _word(value) == _word(asked[name]) or (asked[name] == "auto" and isinstance(value, str))
        if not same:
            found[name] = {"requested": asked[name], "effective": value}
    return found


def _word(value: Any) -> str:
    """Switches are words on the command line and booleans, or null, in config.json."""
    if value is None or isinstance(value, bool):
        return "enable" if value else "disable"
    return str(value)
