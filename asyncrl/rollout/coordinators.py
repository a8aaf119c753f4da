"""The coordinators as the driver sees them: one call a task, the least busy living actor takes it.

Invariants: a coordinator that died gets nothing more, the pool takes its slots back, and its calls fail with
:class:`CoordinatorDied`; every wait has a bound.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError

from asyncrl.engine.base import brief
from asyncrl.engine.waits import bounded
from asyncrl.rollout.summary import GroupSummary
from asyncrl.types import Task

GRACE_S = 30.0
"""What the driver waits beyond a coordinator's own bound, which has the better message."""


class CoordinatorDied(RuntimeError):
    """The actor that had a task has ended; the message says which."""


@dataclass(frozen=True, slots=True)
class Expanded:
    """A completed group: its numbers, and references to the bulk in the object store."""

    summary: GroupSummary
    samples: Any
    """Reference to the list of turn samples."""
    record: Any
    """Reference to the tree's record."""


class Coordinators:
    def __init__(self, handles: Mapping[str, Any], pool: Any, group_timeout_s: float) -> None:
        """``handles``: the coordinators by name, which lease slots of ``pool``."""
        self._handles, self._pool = dict(handles), pool
        self._timeout_s = group_timeout_s + GRACE_S
        self._load: Counter[str] = Counter()

    async def expand(self, task: Task, key: int) -> Expanded:
        """Grow the training forest of ``task``. Raises what the coordinator raised, or CoordinatorDied."""
        async with self._taken(f"the group of {task.env}/{task.id}") as handle:
            summary, samples, record = handle.expand.options(num_returns=3).remote(task, key)
            try:
                return Expanded(await summary, samples, record)
            except asyncio.CancelledError:
                # Or the forest would go on growing for nobody. Its own calls are its own to end: a step that is
                # cancelled from here would look like the failure of its worker.
                ray.cancel(summary, recursive=False)
                raise

    async def evaluate(self, task: Task, key: int) -> GroupSummary:
        """One evaluation episode of ``task``. Raises as ``expand``."""
        async with self._taken(f"an episode of {task.env}/{task.id}") as handle:
            return await handle.evaluate.remote(task, key)

    @asynccontextmanager
    async def _taken(self, what: str) -> AsyncIterator[Any]:
        if not self._handles:
            raise RuntimeError("all coordinators are dead; their logs say why (most often memory: lower tree.leaves)")
        at = min(self._handles, key=lambda name: self._load[name])
        self._load[at] += 1
        try:
            async with bounded(self._timeout_s, what, "runtime.group_timeout_s"):
                yield self._handles[at]
        except RayActorError as error:
            if (handle := self._handles.pop(at, None)) is not None:
                ray.kill(handle)  # if it was only out of reach, it must not use its slots beside their next holder
                self._pool.forget.remote(at, self._timeout_s)  # no call of a group is waited for longer
            raise CoordinatorDied(f"{at} died: {brief(error)}") from error
        finally:
            self._load[at] -= 1
