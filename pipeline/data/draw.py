"""The calibration sample: drawn in ranked order until every length band has its quota.

Whatever the order, the size or the blocks of the source, the same rows are drawn: each candidate is judged in rank
order, by rules that look only at the evaluation set and at what was taken before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.data.leakage import NEAR, Leakage, Shingles, common_ngrams, folded, join, shingles, similar
from pipeline.data.prompts import (
    PromptTemplate,
    Rendered,
    RenderError,
    doubled_bos,
    refuse_doubled,
    render_row,
    tokenize,
)
from pipeline.data.ranking import Ranked
from pipeline.data.redact import Redaction
from pipeline.data.rows import Row
from pipeline.data.strata import Strata, largest_remainder
from pipeline.errors import DataError

BLOCK = 1024  # candidates that are rendered, tokenised and compared at once
HEAD = 1000  # the first candidates, a random sample of the source, show what is boilerplate
# At most so many candidates for each sample are looked at to fill a rare band; then other lengths take its place.
SEARCH = 20
REASONS = ("duplicate", "near_duplicate", "overlap", "redacted", "too_long", "unusable")


@dataclass(frozen=True)
class Sample:
    """One calibration sample. The first ``prompt_tokens`` of ``token_ids`` are the prompt, the rest is the answer.
    ``texts`` are what an evaluation item could hide in, before redaction: they are never written."""

    id: str
    source: str
    token_ids: NDArray[np.int32]
    prompt_tokens: int
    texts: tuple[str, ...] = field(repr=False)


@dataclass
class Drawn:
    """The sample and how it came about.

    ``counts``: rows considered, redacted (of those) and left out by reason. ``unusable``: logged requests that could
    not be rendered, by reason. ``natural``: prompt lengths of the first candidates that could have been used, which is
    what a draw without length bands would have given. ``wanted`` and ``used`` count by band; ``moved`` samples of other
    lengths stand in for bands that ran out.
    """

    samples: list[Sample]
    counts: Counter[str] = field(default_factory=Counter)
    unusable: Counter[str] = field(default_factory=Counter)
    first_unusable: list[str] = field(default_factory=list)
    natural: list[int] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    moved: int = 0


@dataclass(frozen=True)
class _Candidate:
    """A row on its way: why it cannot be used (and what exactly), or its sample and its place in the block's
    shingles. ``copies`` is how many twins it stands for, ``redacted`` whether its text was changed."""

    copies: int
    redacted: bool = False
    fault: str = ""
    detail: str = ""
    sample: Sample | None = None
    place: int = -1


class Judge:
    """Says of candidates, a block at a time, whether they could be used: redacts, renders, tokenises, compares
    them with the evaluation set."""

    def __init__(
        self, template: PromptTemplate, tokenizer: Any, leakage: Leakage, redaction: Redaction, *, answers: bool
    ) -> None:
        self.template, self.tokenizer, self.answers = template, tokenizer, answers
        self.leakage, self.redaction = leakage, redaction

    def judge(self, block: list[tuple[Row, int]], max_tokens: int) -> tuple[list[_Candidate], Shingles]:
        """A candidate for each row of the block, and the shingles of those that were compared."""
        found: list[_Candidate] = []
        kept: list[tuple[Row, str]] = []
        rendered: list[Rendered] = []
        for row, copies in block:
            clean = self.redaction.apply(row, self.tokenizer)
            if clean is None:
                found.append(_Candidate(copies, fault="redacted"))
                continue
            try:
                rendered.append(render_row(self.tokenizer, clean, self.template, answers=self.answers))
            except RenderError as error:
                found.append(_Candidate(copies, fault="unusable", detail=f"{row.id}: {error}"))
                continue
            found.append(_Candidate(copies, redacted=clean is not row, place=len(kept)))
            kept.append((row, clean.source))
        texts = [self._texts(row) for row, _ in kept]
        leaks = self.leakage.items_in(texts)
        ids = tokenize(self.tokenizer, rendered)
        for number, candidate in enumerate(found):
            if (place := candidate.place) < 0:
                continue
            prompt, answer = ids[place]
            row, source = kept[place]
            if row.request is None:
                refuse_doubled(self.tokenizer, prompt, source)
            elif doubled_bos(self.tokenizer, prompt):
                detail = f"{row.id}: the prompt starts with two begin-of-sequence tokens"
                found[number] = replace(candidate, fault="unusable", detail=detail)
                continue
            if len(prompt) + len(answer) > max_tokens:
                found[number] = replace(candidate, fault="too_long")
            elif leaks[place]:
                found[number] = replace(candidate, fault="overlap")
            else:
                whole = np.asarray([*prompt, *answer], dtype=np.int32)
                found[number] = replace(candidate, sample=Sample(row.id, source, whole, len(prompt), texts[place]))
        return found, shingles(source for _, source in kept)

    def _texts(self, row: Row) -> tuple[str, ...]:
        if row.request is not None and isinstance(row.request.prompt, tuple):
            return (self.tokenizer.decode(list(row.request.prompt), skip_special_tokens=True),)
        return row.texts()


class Draw:
    """Draws ``samples`` calibration samples. ``strata`` is None for the source's own lengths."""

    def __init__(self, judge: Judge, *, samples: int, max_tokens: int, strata: Strata | None) -> None:
        self.judge, self.samples, self.max_tokens, self.strata = judge, samples, max_tokens, strata
        quotas = largest_remainder(strata.counts, samples) if strata else [samples]
        counts = Counter({f"left_out_{reason}": 0 for reason in REASONS})
        self.drawn = Drawn([], counts, wanted=quotas, used=[0] * len(quotas))
        self.spare: list[Sample] = []
        self.known: list[Shingles] = []  # of what was taken
        self.seen: set[str] = set()
        self.names: set[str] = set()

    def run(self, rows: Ranked) -> Drawn:
        """The sample. Raises DataError when fewer rows than asked can be used, saying why the others cannot."""
        from tqdm import tqdm

        source = iter(rows)
        head = list(islice(source, HEAD))
        self.common = common_ngrams(shingles(row.source for row, _ in head))
        self.judge.leakage.ignore(self.common)
        with tqdm(total=self.samples, desc="calibration samples", unit="sample", mininterval=1) as bar:
            for block in _blocks(chain(head, source), BLOCK):
                self._place(*self.judge.judge(block, self.max_tokens))
                bar.update(min(self._found(), self.samples) - bar.n)
                if self._done():
                    break
        if self._found() < self.samples:
            raise self._too_few()
        self._fill()
        self.drawn.samples.sort(key=lambda sample: sample.id)
        return self.drawn

    def _place(self, candidates: list[_Candidate], texts: Shingles) -> None:
        """Gives each candidate of a block its place, in order, or counts why it has none."""
        counts = self.drawn.counts
        texts = texts.without(self.common)
        known = _concatenate(self.known)
        before = similar(texts, known, NEAR, None)
        within = similar(texts, texts, NEAR, None)
        taken: set[int] = set()
        for candidate in candidates:
            if self._done():
                break
            counts["considered"] += 1
            counts["left_out_duplicate"] += candidate.copies - 1
            counts["redacted"] += candidate.redacted
            sample, fault = candidate.sample, candidate.fault
            if sample is not None and (key := folded(sample.source)) in self.seen:
                fault = "duplicate"  # redaction made twins
            elif sample is not None and (before[candidate.place] or taken.intersection(within[candidate.place])):
                fault = "near_duplicate"
            if fault or sample is None:
                counts[f"left_out_{fault}"] += 1
                self._note(candidate.detail)
            elif self._take(sample):
                self.seen.add(key)
                taken.add(candidate.place)
        self.known.append(texts.take(sorted(taken)))

    def _take(self, sample: Sample) -> bool:
        if sample.id in self.names:
            raise DataError(
                f"data: calib id {sample.id!r} stands twice", "make data.columns.id unique, or set it to null"
            )
        drawn = self.drawn
        if len(drawn.natural) < self.samples:
            drawn.natural.append(sample.prompt_tokens)
        band = self.strata.band(sample.prompt_tokens) if self.strata else 0
        if band is not None and drawn.used[band] < drawn.wanted[band]:
            drawn.used[band] += 1
            drawn.samples.append(sample)
        elif len(self.spare) < self.samples:
            self.spare.append(sample)
        else:
            return False
        self.names.add(sample.id)
        return True

    def _note(self, detail: str) -> None:
        if detail:
            self.drawn.unusable[detail.partition(": ")[2]] += 1
            if len(self.drawn.first_unusable) < 3:
                self.drawn.first_unusable.append(detail)

    def _found(self) -> int:
        return len(self.drawn.samples) + len(self.spare)

    def _done(self) -> bool:
        if len(self.drawn.samples) == self.samples:
            return True
        return self.drawn.counts["considered"] >= SEARCH * self.samples and self._found() >= self.samples

    def _fill(self) -> None:
        """Spare samples of the nearest lengths stand in for bands that ran out."""
        self.drawn.moved = self.samples - len(self.drawn.samples)
        for band, wanted in enumerate(self.drawn.wanted):
            if missing := wanted - self.drawn.used[band]:
                self.spare.sort(key=lambda sample, band=band: self._gap(band, sample))  # type: ignore[misc]
                self.drawn.samples += self.spare[:missing]
                del self.spare[:missing]

    def _gap(self, band: int, sample: Sample) -> int:
        assert self.strata is not None  # without bands nothing is ever missing here
        low, high = self.strata.edges[band] + 1, self.strata.edges[band + 1]
        return max(low - sample.prompt_tokens, sample.prompt_tokens - high, 0)

    def _too_few(self) -> DataError:
        counts = self.drawn.counts
        considered = counts["considered"]
        left_out = ((counts[f"left_out_{reason}"], reason.replace("_", " ")) for reason in REASONS)
        why = ", ".join(f"{count} {reason}" for count, reason in left_out if count) or "none"
        first = f"; first unusable: {'; '.join(self.drawn.first_unusable)}" if self.drawn.first_unusable else ""
        return DataError(
            f"data: calib.samples asks for {self.samples} calibration samples, but only {self._found()} can be used: "
            f"{considered} different rows, left out: {why}{first}",
            f"give more rows, set calib.samples to at most {self._found()}, or raise calib.max_tokens "
            f"({self.max_tokens}) if length is the reason",
        )


def _concatenate(parts: list[Shingles]) -> Shingles:
    if not parts:
        return join([])
    sizes = np.concatenate([part.sizes for part in parts])
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return Shingles(np.concatenate([part.hashes for part in parts]), starts)


def _blocks(rows: Iterator[tuple[Row, int]], size: int) -> Iterator[list[tuple[Row, int]]]:
    while block := list(islice(rows, size)):
        yield block
