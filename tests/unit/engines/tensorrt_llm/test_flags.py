"""Build flags: the table, what an engine made of them, and what a build's log says."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from pipeline.engines.tensorrt_llm.build import scrape
from pipeline.engines.tensorrt_llm.flags import PLUGINS, differences, effective, plugin_flags, requested, sizes
from pipeline.errors import BuildError
from pipeline.params import Engine, TensorRTLLM


def engine(batch: int, tokens: int, **own: int) -> Engine:
    return Engine(backend="tensorrt_llm", max_batch=batch, max_tokens=tokens, tensorrt_llm=TensorRTLLM(**own))


@pytest.mark.parametrize(
    ("batch", "tokens", "limit", "expected"),
    [
        (16, 2048, 8192, 8192),
        (2, 2048, 8192, 4096),  # no more than all requests at their longest
        (16, 16384, 8192, 16384),  # a prompt has to fit into one pass
        (1, 64, 8192, 64),
    ],
)
def test_tokens_of_one_pass(batch: int, tokens: int, limit: int, expected: int) -> None:
    found = sizes(engine(batch, tokens, max_num_tokens=limit))
    assert found["max_num_tokens"] == expected
    assert (found["max_batch_size"], found["max_seq_len"], found["max_input_len"]) == (batch, tokens, tokens)


def test_the_rules_that_builds_rewrite_by() -> None:
    """The silent rewrites of ``build()`` in the facts' section A.1a: the table asks for nothing that they undo."""
    for (algo, cache), flags in PLUGINS.items():
        paged, fp8_attention = flags.use_paged_context_fmha == "enable", flags.use_fp8_context_fmha == "enable"
        if cache == "INT8" or (cache == "FP8" and algo != "FP8"):
            assert not paged
        if fp8_attention:
            assert algo == "FP8"
        if paged:
            assert fp8_attention == (algo == "FP8" and cache == "FP8")
        assert (flags.gemm_plugin == "disable") == (algo == "FP8")
        assert (flags.use_fused_mlp == "enable") == (algo in (None, "FP8"))


def test_what_is_not_in_the_table_is_refused() -> None:
    with pytest.raises(BuildError, match="no build flags are known for NVFP4 with a KV cache in FP16"):
        plugin_flags("NVFP4", None, 100)
    with pytest.raises(BuildError, match="FP8 attention needs SM 89, this is SM 80"):
        plugin_flags("FP8", "FP8", 80)


def test_differences_between_words_and_what_json_holds() -> None:
    asked = requested(engine(4, 64), "FP8", "FP8", 90)
    recorded = {
        "max_batch_size": 4,
        "max_seq_len": 64,
        "max_num_tokens": 200,
        "version": "ignored",
        "plugin_config": {
            "gemm_plugin": None,
            "context_fmha": True,
            "use_paged_context_fmha": False,
            "use_fp8_context_fmha": True,
            "multiple_profiles": False,
            "nccl_plugin": None,
        },
    }
    got = effective({"build_config": recorded}, set(asked))
    assert "use_fused_mlp" not in got, "recorded nowhere"
    assert differences(asked, got) == {
        "max_num_tokens": {"requested": 256, "effective": 200},
        "use_paged_context_fmha": {"requested": "enable", "effective": False},
    }
    chosen = differences({"gemm_plugin": "auto"}, {"gemm_plugin": "float16"})
    assert chosen == {}, "auto is what it became"
    assert differences({"gemm_plugin": "auto"}, {"gemm_plugin": None}) != {}
    assert asdict(PLUGINS["FP8", "FP8"])["use_fp8_context_fmha"] == "enable"


def test_a_log_is_scraped() -> None:
    """Lines of real builds (two ranks), as their users posted them."""
    log = """
[09/19/2024-03:34:55] [TRT-LLM] [I] Total time of building Unnamed Network 0: 00:00:52
[09/19/2024-03:34:55] [TRT-LLM] [I] Build phase peak memory: 176257.29 MB, children: 17.65 MB
[09/19/2024-03:34:55] [TRT-LLM] [I] Build phase peak memory: 100.00 MB, children: 6296.07 MB
[09/19/2024-03:35:23] [TRT-LLM] [I] Total time of building all engines: 01:01:47
"""
    assert scrape(log) == {"build_s": 3707, "peak_memory_mb": 176257.29, "children_peak_memory_mb": 6296.07}
    assert scrape("nothing") == {}
