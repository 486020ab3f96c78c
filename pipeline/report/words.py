"""Verdicts in plain words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WORDS = {"PROMOTE": "promoted", "REJECT": "refused", "INCONCLUSIVE": "undecided", "INVALID": "not judged"}
COLOURS = {"PROMOTE": "ok", "REJECT": "bad", "INCONCLUSIVE": "open", "INVALID": "void"}
METRICS = {"bleu": "BLEU", "chrf": "chrF", "ter": "TER", "exact_match": "exact match", "rouge_l": "ROUGE-L"}
BACKENDS = {"vllm": "vLLM", "onnxruntime": "ONNX Runtime", "tensorrt": "TensorRT", "tensorrt_llm": "TensorRT-LLM"}
PARTS = {"noise": "noise (A/A)", "runtime": "runtime", "quantization": "quantisation"}
MANY = 4


def headline(verdicts: Mapping[str, str]) -> str:
    """``int8_mixed is promoted, int8_sq is refused.``"""
    if len(verdicts) > MANY:
        promoted = [recipe for recipe, verdict in verdicts.items() if verdict == "PROMOTE"]
        names = f": {', '.join(promoted)}" if promoted else ""
        return f"{len(promoted)} of {len(verdicts)} engines are promoted{names}."
    return ", ".join(f"{recipe} is {WORDS[verdict]}" for recipe, verdict in verdicts.items()) + "."


def sentence(verdict: Mapping[str, Any]) -> str:
    """What the verdict means, in one sentence."""
    failed = sum(not finding["ok"] for finding in verdict["validity"])
    needs = max((row["needs_n"] or 0 for row in verdict["metrics"] if row["importance"] == "critical"), default=0)
    return {
        "PROMOTE": "Shown to stay within every budget.",
        "REJECT": "A loss beyond what the policy allows is proven.",
        "INCONCLUSIVE": "Neither a loss beyond the budget nor its absence is proven"
        + (f"; it takes at least {needs:,} items.".replace(",", " ") if needs else "."),
        "INVALID": "The evaluation is no evidence"
        + (f": {failed} {'check fails' if failed == 1 else 'checks fail'}." if failed else "."),
    }[verdict["verdict"]]


def best_first(verdicts: Mapping[str, str]) -> dict[str, str]:
    """Promoted recipes first, then as in params.yaml."""
    order = list(WORDS)
    return dict(sorted(verdicts.items(), key=lambda pair: order.index(pair[1])))


def backend_name(name: str) -> str:
    """A backend's usual spelling."""
    return BACKENDS.get(name, name)


def metric_name(name: str) -> str:
    """A metric's usual spelling."""
    return METRICS.get(name, name.replace("_", " "))
