"""Everything that a decision rests on, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.files import digest_json
from pipeline.gate.cost import Prices
from pipeline.records import Arm, Item, Record

BASELINE, REPEAT, RUNTIME, CANDIDATE = ROLES = ("baseline", "repeat", "runtime", "candidate")
REQUIRED = (BASELINE, REPEAT, CANDIDATE)
Forced = Mapping[str, Sequence[float]]  # item id -> one number a token


@dataclass(frozen=True)
class Evidence:
    """The input of the gate.

    ``arms`` maps a role to its description and records; ``runtime`` (the engine without quantisation) may be
    absent. ``manifest`` and ``census`` are the candidate engine's, ``card`` is the data card, ``ledger`` holds
    the attempts so far. Where an arm was asked for log-probabilities of given tokens, ``forced`` maps a role
    to the negative log-likelihood of each token, and ``divergence`` an item id to the KL divergence
    (baseline from candidate) at each token, both in nats. ``bench`` maps a role to the content of its bench.json;
    a role that was not benched is absent.
    """

    recipe: str
    items: Sequence[Item]
    arms: Mapping[str, tuple[Arm, Sequence[Record]]]
    manifest: Mapping[str, Any]
    census: Mapping[str, Any]
    card: Mapping[str, Any]
    ledger: Sequence[Mapping[str, Any]] = ()
    forced: Mapping[str, Forced] = field(default_factory=dict)
    divergence: Forced = field(default_factory=dict)
    bench: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    prices: Prices = field(default_factory=Prices)

    def records(self, role: str) -> Sequence[Record]:
        """The records of one arm; none when the arm is absent."""
        return self.arms[role][1] if role in self.arms else ()

    def present(self) -> list[str]:
        """The roles that are there, in a fixed order."""
        return [role for role in ROLES if role in self.arms]

    def evaluation_digest(self) -> str:
        """``sha256:<hex>`` of the evaluation set: what was asked and what the references are, in any order."""
        return digest_json(sorted([item.id, item.reference, list(item.prompt_token_ids)] for item in self.items))


@dataclass(frozen=True)
class Aligned:
    """The same evidence in one order: ``records[role][i]`` answers ``items[i]``; items are sorted by id."""

    items: list[Item]
    records: dict[str, list[Record]]
    groups: NDArray[np.intp]  # shape [items]: the number of the item's group; an item without one is its own

    def texts(self, role: str) -> list[str]:
        """The answers of one arm."""
        return [record.text for record in self.records[role]]


def align(evidence: Evidence, *, cluster: bool) -> Aligned:
    """Sorts items and records by id. Call it only when every arm is known to answer the same ids once."""
    items = sorted(evidence.items, key=lambda item: item.id)
    records = {role: sorted(evidence.records(role), key=lambda record: record.id) for role in evidence.present()}
    names = [f"group:{item.group}" if cluster and item.group is not None else f"item:{item.id}" for item in items]
    groups = np.unique(np.asarray(names), return_inverse=True)[1] if names else np.zeros(0, dtype=np.intp)
    return Aligned(items, records, groups)
