"""The calibration sample and the evaluation set: deduplicated, disjoint, seeded, of the sizes that were asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from pipeline.data.draw import BLOCK, Draw, Drawn, Judge, Sample
from pipeline.data.leakage import Leakage
from pipeline.data.prompts import PromptTemplate, Rendered, RenderError, refuse_doubled, render_row, tokenize
from pipeline.data.ranking import Ranked, by_id
from pipeline.data.redact import Redaction, load_redactor
from pipeline.data.rows import Row
from pipeline.data.strata import Strata, distance, plan_strata
from pipeline.errors import DataError
from pipeline.files import read_jsonl, write_jsonl
from pipeline.params import Params
from pipeline.records import Item

KEEP, KEEP_LEAST = 4, 2000  # rows in memory for each one asked, and at least
PROFILE = 10_000  # prompts of a profile log whose lengths are taken


@dataclass(frozen=True)
class Sampled:
    """Both sets, and how they came about (for the data card).

    ``counts`` are those of both sets. ``profile`` is the prompt lengths that the calibration set should have.
    ``overlaps`` maps an evaluation item to a calibration sample, over what is used: it must be empty.
    """

    calibration: list[Sample]
    evaluation: list[Item]
    counts: dict[str, int]
    overlaps: dict[str, str]
    boilerplate: int
    strata: Strata | None
    profile: list[int]
    drawn: Drawn

    def distances(self) -> dict[str, Any]:
        """How far the prompt lengths are from the profile, as drawn and as an unstratified draw would have been."""
        after = [sample.prompt_tokens for sample in self.calibration]
        return {"before": distance(self.drawn.natural, self.profile), "after": distance(after, self.profile)}


def sample(
    params: Params, calib_rows: Iterable[Row], eval_rows: Iterable[Row], tokenizer: Any, profile: Iterable[Row] = ()
) -> Sampled:
    """Draws both sets; the rows must be iterable more than once. ``profile`` are the rows of a profile log.

    Raises DataError when either set would be smaller than asked, or an id stands twice. Samples longer than
    ``calib.max_tokens`` and items that the engine could not take are left out whole and counted; nothing is cut.
    """
    template = PromptTemplate(params.prompt.template, params.prompt.user, params.prompt.system)
    counts: dict[str, int] = {}
    evaluation, rendered = _evaluation(params, eval_rows, template, tokenizer, counts)
    leakage = Leakage(
        {item.id: _variants(item.source, template, prompt) for item, prompt in zip(evaluation, rendered, strict=True)}
    )
    lengths = [len(item.prompt_token_ids) for item in evaluation]
    if params.data.profile_log is not None:
        lengths = _lengths(params, profile, template, tokenizer)
    strata = plan_strata(lengths, params.calib.strata) if params.calib.strata > 1 else None
    redaction = Redaction([load_redactor(name) for name in params.data.redact])
    judge = Judge(template, tokenizer, leakage, redaction, answers=params.calib.answers)
    ranked = Ranked(calib_rows, params.seed, "calib", max(KEEP_LEAST, KEEP * params.calib.samples))
    draw = Draw(judge, samples=params.calib.samples, max_tokens=params.calib.max_tokens, strata=strata)
    drawn = draw.run(ranked)
    _refuse_unusable(params, drawn.unusable.total(), drawn.counts["considered"], drawn.first_unusable)
    counts["calib_rows"] = ranked.read
    counts |= {f"calib_{name}": count for name, count in sorted(drawn.counts.items())}
    counts |= {"calib_other_lengths": drawn.moved}
    counts |= {"calib_asked": params.calib.samples, "calib_used": len(drawn.samples)}
    return Sampled(
        calibration=drawn.samples,
        evaluation=evaluation,
        counts=counts,
        # Once more over what is used: the gate reads this, and must not rely on the filter above.
        overlaps=leakage.overlaps({one.id: one.texts for one in drawn.samples}),
        boilerplate=len(leakage.common),
        strata=strata,
        profile=lengths,
        drawn=drawn,
    )


def _variants(source: str, template: PromptTemplate, rendered: str) -> tuple[str, ...]:
    """The forms in which an item can stand in a prompt log: alone, in the user's message, as the whole prompt."""
    return (source, template.user.replace("{source}", source), rendered)


def _evaluation(
    params: Params, rows: Iterable[Row], template: PromptTemplate, tokenizer: Any, counts: dict[str, int]
) -> tuple[list[Item], list[str]]:
    """The items and their prompts as text."""
    asked, limit = params.eval.samples, params.engine.max_tokens - params.eval.max_new_tokens
    found: Counter[str] = Counter()
    ranked = Ranked(rows, params.seed, "eval", max(KEEP_LEAST, KEEP * asked))
    items: dict[str, Item] = {}
    texts: list[str] = []
    for row, copies in ranked:
        if len(items) == asked:
            break
        found["considered"] += 1
        found["left_out_duplicate"] += copies - 1
        if params.eval.max_words is not None and len(row.source.split()) > params.eval.max_words:
            found["left_out_too_many_words"] += 1
            continue
        if row.id in items:
            raise DataError(f"data: eval id {row.id!r} stands twice", "make data.columns.id unique, or set it to null")
        one = template.render(tokenizer, row.source)
        ids = tokenize(tokenizer, [one])[0][0]
        refuse_doubled(tokenizer, ids, row.source)
        if len(ids) > limit:
            found["left_out_too_long"] += 1
            continue
        items[row.id] = Item(row.id, row.source, row.target, tuple(ids), row.group, (length_tag(len(ids)),))
        texts.append(str(one.prompt))
    counts["eval_rows"] = ranked.read
    counts |= {f"eval_{name}": count for name, count in sorted(found.items())}
    counts |= {"eval_asked": asked, "eval_used": len(items)}
    if len(items) < asked:
        why = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in sorted(found.items()) if count)
        raise DataError(
            f"data: eval.samples asks for {asked} evaluation items, but only {len(items)} can be used: {why}",
            f"give more rows, set eval.samples to at most {max(1, len(items))}, or raise eval.max_words "
            f"({params.eval.max_words}) or engine.max_tokens ({params.engine.max_tokens})",
        )
    order = sorted(zip(items.values(), texts, strict=True), key=lambda pair: pair[0].id)
    return [item for item, _ in order], [text for _, text in order]


def _lengths(params: Params, rows: Iterable[Row], template: PromptTemplate, tokenizer: Any) -> list[int]:
    """Prompt lengths of a profile log: of up to ``PROFILE`` requests, frequent ones as often as they came."""
    ranked = Ranked(rows, params.seed, "profile", PROFILE, key=by_id)
    lengths: list[int] = []
    block: list[Rendered] = []
    unusable: list[str] = []
    for row, _ in islice(ranked, PROFILE):
        try:
            block.append(render_row(tokenizer, row, template, answers=False))
        except RenderError as error:
            unusable.append(f"{row.id}: {error}")
        if len(block) == BLOCK:
            lengths += [len(prompt) for prompt, _ in tokenize(tokenizer, block)]
            block = []
    lengths += [len(prompt) for prompt, _ in tokenize(tokenizer, block)]
    _refuse_unusable(params, len(unusable), len(unusable) + len(lengths), unusable)
    if not lengths:
        raise DataError("data.profile_log: the log holds no request", "check the file, or set profile_log to null")
    return lengths


def _refuse_unusable(params: Params, count: int, considered: int, first: list[str]) -> None:
    """Logged requests that cannot be rendered are held to the same share as lines that cannot be read."""
    if count > params.data.log_bad_lines * considered:
        raise DataError(
            f"data: {count} of {considered} logged requests cannot be rendered, first {'; '.join(first[:3])}",
            "calibrate a checkpoint on requests that it can serve, or allow more with data.log_bad_lines",
        )


def length_tag(tokens: int) -> str:
    """The length band of a prompt, a power of two: ``len:32-63``."""
    low = 1 << (tokens.bit_length() - 1)
    return f"len:{low}-{2 * low - 1}"


def write_calibration(path: Path, samples: Iterable[Sample]) -> None:
    """Writes the calibration sample, a JSON object a line: ``id``, ``source``, ``token_ids``, ``prompt_tokens``."""
    write_jsonl(
        path,
        (
            {
                **{"id": one.id, "source": one.source, "prompt_tokens": one.prompt_tokens},
                "token_ids": one.token_ids.tolist(),
            }
            for one in samples
        ),
    )


def read_calibration(path: Path) -> list[list[int]]:
    """The token ids of the calibration sample."""
    return [row["token_ids"] for row in read_jsonl(path)]
