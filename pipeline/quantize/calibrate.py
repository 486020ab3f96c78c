"""Post-training quantisation with NVIDIA ModelOpt over our own forward loop.

ModelOpt inserts the quantizers; our loop finds the maxima of their inputs (packed batches, resumable, shared between
ranks); ModelOpt's algorithm turns the maxima into scales. AWQ is different: its search needs ModelOpt's own layers in
the loop, twice, and no state of it can be saved.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pipeline.errors import QuantizationError
from pipeline.quantize.batches import Batch, Samples, plan, share, split
from pipeline.quantize.feed import prefetched
from pipeline.quantize.packing import Packed, PackedForward, check_packing, pack, rectangular
from pipeline.quantize.ranks import Ranks
from pipeline.quantize.recipes import Recipe
from pipeline.quantize.resume import Resume, Saved
from pipeline.quantize.statistics import Maxima, enabled_quantizers


def usual_budget(width: int, tokens: int, cuda: bool) -> int:
    """Tokens of a forward pass when nobody says: enough to keep the device busy, and 8 batches at least.

    ``width`` is the model's hidden size. On a GPU a batch of 2**27 numbers a layer (32768 tokens of a 7B model) hides
    the launches; on a CPU a few thousand tokens are as fast as more.
    """
    most = min(131072, 2**27 // width) if cuda else 4096
    return max(1024, min(most, tokens // 8))


@dataclass
class Calibration:
    """How a calibration went, for the census. ``batching``: ``packed`` or ``equal lengths``, with ``why`` not packed.
    ``out_of_memory``: each time the token budget was halved. ``never_called``: quantizers that no sample reached.
    ``seconds``: of the passes over the samples in this process."""

    samples: int
    tokens: int
    batches: int
    budget: int
    batching: str
    why: str | None = None
    out_of_memory: list[dict[str, int]] = field(default_factory=list)
    never_called: list[str] = field(default_factory=list)
    resumed_batches: int = 0
    seconds: float = 0.0

    def facts(self) -> dict[str, Any]:
        """What belongs into the census: the same whether or not the run was killed and resumed."""
        found = asdict(self)
        for key in ("resumed_batches", "seconds", "never_called"):
            del found[key]
        return found


def quantize_model(
    model: Any,
    recipe: Recipe,
    samples: Samples | Sequence[Sequence[int]],
    budget: int | None = None,
    *,
    resume: Resume | None = None,
    ranks: Ranks | None = None,
) -> Calibration | None:
    """Calibrates ``model`` in place on ``samples`` within ``budget`` tokens a forward pass (None: by device).

    Returns None on all ranks but the first, whose model alone is quantised. Raises QuantizationError when the recipe
    matches no layer, an activation is not finite, a single sample does not fit the memory, or a rank is lost.
    """
    import modelopt.torch.quantization as mtq

    ranks = ranks or Ranks()
    if recipe.algorithm == "awq" and ranks.size > 1:
        raise QuantizationError("AWQ's search runs in one process", "set calib.processes to 1 for this recipe")
    model.eval()
    config = recipe.modelopt_config()
    rows = samples if isinstance(samples, Samples) else Samples(samples)
    run = _Run(model, recipe, rows, budget, ranks)
    # One warning for each layer that the recipe leaves out; the census lists them.
    warnings.filterwarnings("ignore", message=".*is not calibrated, skip smoothing")
    warnings.filterwarnings("ignore", message="Distributed training is initialized but no parallel_state")
    try:
        if recipe.algorithm == "awq":
            mtq.quantize(model, config, run.search)
            return run.outcome
        mtq.quantize(model, config | {"algorithm": None}, None)
    except RuntimeError as error:
        if "nothing would be quantized" not in str(error):
            raise
        raise QuantizationError(
            f"the recipe ({recipe.description}) matches no layer of {type(model).__name__}",
            "correct its `include` and `exclude`; `enginegate recipes` shows each recipe",
        ) from error
    maxima = run.collect(resume)
    if ranks.rank:
        return None
    mtq.calibrate(model, config["algorithm"], maxima.give_to_modelopt)
    return run.outcome


class _Run:
    """One model and its samples in batches."""

    def __init__(self, model: Any, recipe: Recipe, samples: Samples, budget: int | None, ranks: Ranks) -> None:
        self._model, self._recipe, self._samples, self._ranks = model, recipe, samples, ranks
        self._device = model.get_input_embeddings().weight.device
        if self._device.type == "meta":  # offloaded: accelerate moves the inputs
            self._device = type(self._device)("cpu")
        self._body = model.base_model
        self._passes = 0
        self._maxima: Maxima | None = None  # AWQ keeps its own statistics
        width = model.get_input_embeddings().weight.shape[1]
        self.budget = budget or usual_budget(width, samples.tokens, self._device.type == "cuda")
        order = sorted(range(len(samples)), key=lambda place: (-samples.lengths[place], place))
        pair = [samples[order[0]], samples[order[-1]]]
        why = check_packing(self._body, pair, self._device)
        self._forward: Callable[[Any], contextlib.AbstractContextManager[Any]] = rectangular if why else PackedForward
        self._batches = plan(samples.lengths, self.budget, equal=why is not None)
        self.outcome = Calibration(
            samples=len(samples),
            tokens=samples.tokens,
            batches=len(self._batches),
            budget=self.budget,
            batching="equal lengths" if why else "packed",
            why=why,
        )

    def collect(self, resume: Resume | None) -> Maxima:
        """The maxima over all samples, merged between ranks."""
        maxima = Maxima(self._model, per_channel=self._recipe.algorithm == "smoothquant")
        done = self._load(maxima, resume)
        self._ranks.join()
        left = set(range(len(self._batches))) - self._ranks.agree(done)
        self.outcome.resumed_batches = len(self._batches) - len(left)
        mine = share(self._batches, left, self._ranks.size)[self._ranks.rank]
        state = Saved(done=done)
        started = time.perf_counter()
        self._maxima = maxima
        with maxima.watching():
            for number in self._run(mine, already=self.outcome.resumed_batches):
                done.add(number)
                if resume is not None and resume.due():
                    self._save(resume, state, maxima)
        if resume is not None and mine:
            self._save(resume, state, maxima)
        maxima.check_finite()
        self._ranks.merge(maxima)
        self._ranks.leave()
        self.outcome.seconds = time.perf_counter() - started
        self.outcome.never_called = sorted(set(maxima.watched) - maxima.called)
        return maxima

    def search(self, model: Any) -> None:
        """A pass of ModelOpt's own, which keeps its own statistics."""
        self._passes += 1
        started = time.perf_counter()
        for _ in self._run(range(len(self._batches)), f"pass {self._passes}, ", model):
            pass
        self.outcome.seconds += time.perf_counter() - started

    def _load(self, maxima: Maxima, resume: Resume | None) -> set[int]:
        if resume is None:
            return set()
        import modelopt
        import torch

        resume.identify(
            recipe=self._recipe.identity(),
            samples=self._samples.digest(),
            batches=[self.outcome.batching, self.budget],
            precision=str(self._model.dtype),
            device=self._device.type,
            versions=[torch.__version__, modelopt.__version__],
        )
        saved = resume.load()
        maxima.merge({name: value.to(self._device) for name, value in saved.values.items()}, saved.called)
        self.budget = min(self.budget, saved.budget or self.budget)
        if self._ranks.rank == 0 and saved.done:
            print(f"resuming: {len(saved.done)} of {len(self._batches)} batches are done")
        elif self._ranks.rank == 0 and resume.others():
            print(f"{resume.folder}: {resume.others()} states of other inputs are left alone")
        return saved.done

    def _save(self, resume: Resume, state: Saved, maxima: Maxima) -> None:
        maxima.check_finite()  # now rather than after hours
        state.values, state.called, state.budget = maxima.values, maxima.called, self.budget
        resume.save(self._ranks.rank, state)

    def _run(self, numbers: Any, note: str = "", model: Any = None, already: int = 0) -> Iterator[int]:
        """Runs these batches and yields the number of each when it is done."""
        import torch
        from tqdm import tqdm

        numbers = list(numbers)
        tokens = sum(self._batches[number].tokens for number in numbers)
        share_of = f"rank 0 of {self._ranks.size}, " if self._ranks.size > 1 else ""
        bar = tqdm(
            total=tokens,
            unit="tok",
            unit_scale=True,
            mininterval=2,
            desc=f"calibrating ({share_of}{note}{len(numbers)} batches{', resumed' if already else ''})",
            disable=self._ranks.rank != 0,
        )
        body = self._body_for(model or self._model)
        with bar, torch.no_grad(), self._forward(body) as forward:
            for number, packed in prefetched(self._pieces(numbers), self._pack, self._device):
                self._try(forward, number, packed)
                bar.update(number.tokens)
                if number.last:
                    yield number.batch

    def _body_for(self, model: Any) -> Any:
        """The model without its logits head, where nothing in the head is quantised: the head would be a third of the
        time and most of the memory of a small model."""
        prefix = model.base_model_prefix + "."
        outside = [name for name in enabled_quantizers(model) if not name.startswith(prefix)]
        return model if outside else model.base_model

    def _pieces(self, numbers: list[int]) -> Iterator[_Piece]:
        for number in numbers:
            parts = split(self._batches[number], self._samples.lengths, self.budget)
            for place, part in enumerate(parts):
                yield _Piece(number, part, last=place == len(parts) - 1)

    def _pack(self, piece: _Piece, pinned: bool) -> Packed:
        return pack([self._samples[place] for place in piece.part.places], pinned)

    def _try(self, forward: Any, piece: _Piece, packed: Packed) -> None:
        """One forward pass; where the memory is short the same samples again in smaller parts."""
        import torch

        if len(split(piece.part, self._samples.lengths, self.budget)) > 1:  # the budget fell since it was packed
            self._in_parts(forward, piece)
            return
        try:
            forward(packed)
            if self._maxima is not None:
                self._maxima.keep()
            return
        except torch.OutOfMemoryError as error:
            part, message = piece.part, str(error).splitlines()[0]
        if self._maxima is not None:
            self._maxima.forget()
        if self._recipe.algorithm == "awq":
            raise SearchMemoryError(part.size, message)
        if len(part.places) == 1:
            raise QuantizationError(
                f"a single sample of {part.tokens} tokens does not fit the memory ({message})",
                "lower calib.max_tokens, or set calib.device_map: auto to spread the model",
            )
        del packed
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.budget = min(self.budget, max(part.longest, part.size // 2))
        self.outcome.out_of_memory.append({"batch": piece.batch, "tokens": part.tokens, "budget": self.budget})
        print(f"out of memory at {part.size} tokens: going on with {self.budget}")
        self._in_parts(forward, piece)

    def _in_parts(self, forward: Any, piece: _Piece) -> None:
        for part in split(piece.part, self._samples.lengths, self.budget):
            smaller = _Piece(piece.batch, part, last=False)
            self._try(forward, smaller, self._pack(smaller, pinned=False).on(self._device))


@dataclass(frozen=True)
class _Piece:
    """A ``part`` of batch number ``batch``; ``last``: with it the batch is done."""

    batch: int
    part: Batch
    last: bool

    @property
    def tokens(self) -> int:
        return self.part.tokens


class SearchMemoryError(QuantizationError):
    """AWQ's sums were half updated: its passes must start again, with a smaller budget. ``size``: what did not fit."""

    def __init__(self, size: int, message: str) -> None:
        super().__init__(f"out of memory at {size} tokens in AWQ's search ({message})", "lower calib.batch_tokens")
        self.size = size
