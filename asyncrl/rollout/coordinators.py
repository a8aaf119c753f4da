"""The coordinators as the driver sees them: one call a task, the least busy actor takes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.rollout.coordinator import GroupSummary
from asyncrl.types import Task


@dataclass(frozen=True, slots=True)
class Expanded:
    """A completed group: its numbers, and references to the bulk in the object store."""

    summary: GroupSummary
    samples: Any
    """Reference to the list of turn samples."""
    record: Any
    """Reference to the tree's record."""


class Coordinators:
    def __init__(self, handles: Sequence[Any]) -> None:
        self._handles = list(handles)
        self._load: Counter[int] = Counter()

    async def expand(self, task: Task, key: int) -> Expanded:
        """Grow the training forest of ``task``. Raises what the coordinator raised."""
        at = self._take()
        try:
            summary, samples, record = self._handles[at].expand.options(num_returns=3).remote(task, key)
            return Expanded(await summary, samples, record)
        finally:
            self._load[at] -= 1

    async def evaluate(self, task: Task, key: int) -> GroupSummary:
        """One evaluation episode of ``task``."""
        at = self._take()
        try:
            summary: GroupSummary = await self._handles[at].evaluate.remote(task, key)
            return summary
        finally:
            self._load[at] -= 1

    def _take(self) -> int:
        at = min(range(len(self._handles)), key=lambda i: self._load[i])
        self._load[at] += 1
        return at
