"""Several processes calibrate one checkpoint together: each runs its share of the batches, the maxima are merged.

``torchrun --nproc-per-node 2 -m stages.quantize RECIPE`` or any launcher that sets RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR and MASTER_PORT. Maxima travel over NCCL between GPUs and over gloo between CPUs. Nobody waits for ever:
a rank that does not come within ``wait_s`` ends the run.
"""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.errors import QuantizationError
from pipeline.quantize.statistics import Maxima


@dataclass(frozen=True)
class Ranks:
    """This process's ``rank`` among ``size``; ``local`` is its place among the ``here`` on its machine, and its GPU."""

    rank: int = 0
    size: int = 1
    local: int = 0
    here: int = 1
    wait_s: float = 1800.0

    @classmethod
    def from_environment(cls, wait_s: float) -> Ranks:
        """What a launcher said; one process alone without one. Raises QuantizationError for half an environment."""
        if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
            return cls(wait_s=wait_s)
        try:
            rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        except (KeyError, ValueError) as error:
            raise QuantizationError(
                f"the launcher set only half of RANK and WORLD_SIZE ({error})", "use torchrun, or set both"
            ) from error
        local, here = os.environ.get("LOCAL_RANK", rank), os.environ.get("LOCAL_WORLD_SIZE", size)
        return cls(rank, size, int(local), int(here), wait_s)

    def join(self) -> None:
        """Meets the other ranks. Raises QuantizationError when they do not come."""
        import torch
        import torch.distributed as dist

        if self.size == 1 or dist.is_initialized():
            return
        backend = "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(self.local)
            backend = "cpu:gloo,cuda:nccl"
        try:
            dist.init_process_group(backend, timeout=datetime.timedelta(seconds=self.wait_s))
            # A link that does not work shows now rather than after the last batch.
            dist.all_reduce(torch.zeros(1, device=self._device))
        except (RuntimeError, ValueError) as error:
            raise self._lost(error) from error

    def agree(self, done: set[int]) -> set[int]:
        """The batches that any rank has the maxima of already, the same answer on every rank."""
        import torch.distributed as dist

        if self.size == 1:
            return done
        found: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(found, sorted(done), group=_host_group())
        except RuntimeError as error:
            raise self._lost(error) from error
        return {number for numbers in found for number in numbers}

    def merge(self, maxima: Maxima) -> None:
        """After this every rank holds the maxima of all. Raises QuantizationError when a rank does not come."""
        import torch
        import torch.distributed as dist

        if self.size == 1:
            return
        watched = maxima.watched
        # -1 stands for "never called": no magnitude is below zero. float32 holds every bfloat16 and float16 exactly.
        parts = []
        for name, count in watched.items():
            if count:
                value = maxima.values.get(name)
                parts.append(torch.full((count,), -1.0) if value is None else value.float().reshape(-1).cpu())
        called = torch.tensor([float(name in maxima.called) for name in watched])
        together = torch.cat([*parts, called]).to(self._device)
        try:
            # Waits on the host first, where the time limit names who is missing; NCCL's own would end the process.
            dist.monitored_barrier(_host_group(), timeout=datetime.timedelta(seconds=self.wait_s))
            dist.all_reduce(together, op=dist.ReduceOp.MAX)
        except RuntimeError as error:
            raise self._lost(error) from error
        *merged, called = together.split([*(count for count in watched.values() if count), len(watched)])
        names = [name for name, count in watched.items() if count]
        found = {
            name: value if name in maxima._per_channel else value[0]
            for name, value in zip(names, merged, strict=True)
            if float(value.max()) >= 0
        }
        dtypes = {name: value.dtype for name, value in maxima.values.items()}
        usual = next(iter(dtypes.values()), torch.float32)
        maxima.merge(
            {name: value.to(dtypes.get(name, usual)) for name, value in found.items()},
            {name for name, flag in zip(watched, called.tolist(), strict=True) if flag > 0},
        )

    def leave(self) -> None:
        """Ends the group; from here on each rank is alone."""
        import torch.distributed as dist

        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()
            _GROUPS.clear()

    @property
    def _device(self) -> str:
        import torch

        return f"cuda:{self.local}" if torch.cuda.is_available() else "cpu"

    def _lost(self, error: Exception) -> QuantizationError:
        return QuantizationError(
            f"rank {self.rank} of {self.size}: another rank is lost: {str(error).strip().splitlines()[0]}",
            "see its own message above; nothing was written, and the same command resumes",
        )


_GROUPS: list[Any] = []


def _host_group() -> Any:
    """A gloo group for what is not a tensor on a GPU (the default one where there is no GPU)."""
    import torch.distributed as dist

    if "nccl" not in str(dist.get_backend_config()):
        return None
    if not _GROUPS:
        _GROUPS.append(dist.new_group(backend="gloo"))
    return _GROUPS[0]


def launch(processes: int, arguments: Sequence[str]) -> None:
    """Runs ``python -m ARGUMENTS`` in that many processes of this machine with torchrun.

    Raises QuantizationError when one of them fails; torchrun then ends the others.
    """
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(processes), "-m", *arguments),
    ]
    code = subprocess.run(command, check=False).returncode
    if code:
        raise QuantizationError(
            f"calibration with {processes} processes ended with code {code}: a rank failed, its message is above",
            "nothing was written; the same command resumes from the last saved state",
        )
