"""The table of metrics. A new metric is one file and one line here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass

from pipeline.evaluate.base import Metric
from pipeline.evaluate.bleu import Bleu
from pipeline.evaluate.choice import Choice
from pipeline.evaluate.chrf import Chrf
from pipeline.evaluate.exact_match import ExactMatch
from pipeline.evaluate.json_valid import JsonValid
from pipeline.evaluate.placeholders import Placeholders
from pipeline.evaluate.rouge_l import RougeL
from pipeline.evaluate.ter import Ter
from pipeline.evaluate.token_f1 import TokenF1

Option = str | int | bool
METRICS: dict[str, type[Metric]] = {
    metric.name: metric for metric in (Bleu, Chrf, Ter, ExactMatch, TokenF1, RougeL, Choice, JsonValid, Placeholders)
}


def make_metric(name: str, options: Mapping[str, Option] | None = None) -> Metric:
    """The metric ``name`` with ``options``. Raises ValueError that starts with the key it refuses."""
    if name not in METRICS:
        raise ValueError(f"{name}: no such metric; there are {', '.join(METRICS)}")
    kind = METRICS[name]
    assert is_dataclass(kind)
    known = {field.name: field.default for field in fields(kind)}
    for key, value in (options or {}).items():
        if key not in known:
            raise ValueError(f"{name}.{key}: unknown option; there are {', '.join(known) or 'none'}")
        if type(value) is not type(known[key]):
            raise ValueError(f"{name}.{key}: must be like {known[key]!r}, not {value!r}")
    try:
        metric = kind(**dict(options or {}))
        metric.signature()  # refuses, for instance, a tokenizer that sacrebleu does not know
    except ValueError as error:
        raise ValueError(f"{name}.{error}") from error
    return metric
