"""What the driver knows of a run, as one value: the loop works on it, a checkpoint holds it.

Invariant: a task taken from the sampler is in exactly one place: waiting to be admitted again, running, ready, in the
batch that is being trained, or in the ledger.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from asyncrl.rollout.coordinators import Expanded
from asyncrl.runtime.ledger import Ledger
from asyncrl.runtime.measure import BiasMeter, Totals
from asyncrl.types import Task


@dataclass(frozen=True, slots=True)
class Attempt:
    """A task that has been admitted."""

    position: int
    """The task's number in the sampler's order."""
    task: Task
    key: int
    """Admission number, unique in a run."""
    admitted_at: int
    """The learner's version then."""
    number: int = 1
    """Which attempt at the task this is."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A completed group that waits to be trained."""

    attempt: Attempt
    done: int
    """The learner's version when the group was complete."""
    group: Expanded


@dataclass(slots=True)
class RunState:
    version: int = 0
    update: int = 0
    updates_at: dict[int, int] = field(default_factory=lambda: {0: 0})
    """Updates made when a version was published."""
    next_key: int = 0
    next_position: int = 0
    again: deque[tuple[int, int]] = field(default_factory=deque)
    """(position, number of the next attempt) of tasks to admit before new ones."""
    running: dict[int, Attempt] = field(default_factory=dict)
    ready: dict[int, Ready] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    totals: Totals = field(default_factory=Totals)
    bias: BiasMeter = field(default_factory=BiasMeter)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Where the driver's time went: wait, update, publish, ..., and admission_blocked beside them."""

    def to_json(self) -> dict[str, Any]:
        """Everything but the ready groups' bulk; unfinished forests become tasks to admit again."""
        unfinished = sorted([*self.again, *((run.position, run.number) for run in self.running.values())])
        return {
            "version": self.version,
            "update": self.update,
            "updates_at": sorted(self.updates_at.items()),
            "next_key": self.next_key,
            "next_position": self.next_position,
            "again": unfinished,
            "ready": [asdict(ready.attempt) | {"done": ready.done} for ready in self.ready.values()],
            "ledger": self.ledger.to_json(),
            "totals": self.totals.to_json(),
            "bias": list(self.bias.groups),
            "seconds": dict(self.seconds),
        }

    @classmethod
    def from_json(cls, facts: Mapping[str, Any], groups: Mapping[int, Expanded]) -> RunState:
        """The inverse of :meth:`to_json`.

        Args:
            groups: the ready groups by key.
        """
        state = cls(
            version=facts["version"],
            update=facts["update"],
            updates_at=dict(facts["updates_at"]),
            next_key=facts["next_key"],
            next_position=facts["next_position"],
            again=deque((position, number) for position, number in facts["again"]),
            ledger=Ledger.from_json(facts["ledger"]),
            totals=Totals.from_json(facts["totals"]),
            bias=BiasMeter(facts["bias"]),
            seconds=defaultdict(float, facts["seconds"]),
        )
        for entry in facts["ready"]:
            attempt = Attempt(
                entry["position"], Task(**entry["task"]), entry["key"], entry["admitted_at"], entry["number"]
            )
            state.ready[attempt.key] = Ready(attempt, entry["done"], groups[attempt.key])
        return state
