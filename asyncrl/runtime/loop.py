"""The asynchronous loop, as a person would tell it: admit, expand, score, batch, update, publish, record.

Invariants: there is no barrier across tasks; while the learner trains a batch, other groups go on and new ones are
admitted as far as the lag bound allows; each admitted task's group is trained once, or reported lost with a cause and
its task admitted again; the driver holds numbers and references, the bulk stays in the object store.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from asyncrl.algo.staleness import lags as lag_counts
from asyncrl.config.run import RunConfig
from asyncrl.learner.group import LearnerGroup
from asyncrl.rollout.coordinator import GroupSummary
from asyncrl.rollout.coordinators import GRACE_S, Expanded
from asyncrl.rollout.waits import bounded
from asyncrl.runtime.admission import Admission
from asyncrl.runtime.measure import batch_metrics, lag_metrics, spans_of
from asyncrl.runtime.publish import check_publish, publish
from asyncrl.runtime.sampler import TaskSampler
from asyncrl.runtime.system import System
from asyncrl.track.base import Tracker
from asyncrl.types import Task

log = logging.getLogger(__name__)

ATTEMPTS = 3
"""How often a task is admitted before it is dropped with its cause."""
LOST_IN_A_ROW = 50
"""Groups lost without a finished one between them before the run gives up."""
GAP_MAX = 1e-2
PROBES = 4
"""Turns whose log-probs are compared after a publish."""


@dataclass(slots=True)
class Totals:
    """What a run came to."""

    groups: int = 0
    turn_samples: int = 0
    tokens_generated: int = 0
    leaves_max: int = 0
    branched_turns: int = 0
    lost: int = 0
    """Groups lost to infrastructure; their tasks were admitted again."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Tasks that were given up, and why."""
    digests_checked: int = 0
    digest_mismatches: int = 0
    logprob_gap_max: float = 0.0
    lags: Counter[int] = field(default_factory=Counter)
    """Turn samples by lag in versions."""
    counters: Counter[str] = field(default_factory=Counter)


class Loop:
    """One training run over a started system.

    Args:
        record: called once a batch with (version, update, record references).
        after_publish: called with the new version after each publish: evaluation, checkpoints.
    """

    def __init__(
        self,
        config: RunConfig,
        system: System,
        sampler: TaskSampler,
        tracker: Tracker,
        record: Callable[[int, int, Sequence[Any]], Awaitable[None]],
        after_publish: Callable[[int], Awaitable[None]],
    ) -> None:
        self._config, self._system, self._sampler = config, system, sampler
        self._tracker, self._record, self._after_publish = tracker, record, after_publish
        self._learner = cast(LearnerGroup, system.learner)
        self._admission = Admission(config.runtime.groups_per_batch, config.runtime.max_lag)
        self._wanted = config.runtime.versions * config.runtime.groups_per_batch
        self._running: dict[int, int] = {}
        self._ready: dict[int, tuple[int, Expanded]] = {}
        self._training = 0
        self._next_key = 0
        self._next_task = 0
        self._again: deque[Task] = deque()
        self._attempts: Counter[Task] = Counter()
        self._lost_in_a_row = 0
        self._updates_at = {0: 0}
        self._changed = asyncio.Event()
        self.version = 0
        self.update = 0
        self.totals = Totals()

    async def run(self) -> Totals:
        async with asyncio.TaskGroup() as self._expansions:
            while self.version < self._config.runtime.versions:
                waiting = time.monotonic()
                batch = await self._next_batch()
                training = time.monotonic()
                metrics, lags = await self._train(batch)
                publishing = time.monotonic()
                metrics |= await self._publish(batch)
                metrics |= {
                    "time/wait_s": training - waiting,
                    "time/train_s": publishing - training,
                    "time/publish_s": time.monotonic() - publishing,
                }
                self._tracker.log(self.version, metrics, {"lag/versions": list(lags.elements())})
                await self._after_publish(self.version)
        return self.totals

    def _admit(self) -> None:
        """Start tasks as far as the lag bound allows; no more than the run will train."""
        outstanding = len(self._running) + len(self._ready) + self._training
        trained = self.version * self._config.runtime.groups_per_batch
        while trained + outstanding < self._wanted and self._admission.may_admit(outstanding):
            if self._again:
                task = self._again.popleft()
            else:
                task = self._sampler.task(self._next_task)
                self._next_task += 1
            self._running[self._next_key] = self.version
            self._expansions.create_task(self._expand(task, self._next_key))
            self._next_key += 1
            outstanding += 1

    async def _expand(self, task: Task, key: int) -> None:
        """Grow the task's forest; keep the group until it is trained, or admit the task again."""
        cause, retry = "", True
        try:
            group = await self._system.coordinators.expand(task, key)
            counters = group.summary.counters
            if group.summary.leaves < self._config.tree.roots:
                losses = {name: count for name, count in counters.items() if name.startswith("lost_") and count}
                cause = f"only {group.summary.leaves} of at least {self._config.tree.roots} leaves ended: {losses}"
                retry = not counters.get("lost_prompt_too_long")
                self.totals.counters.update(counters)
        except Exception as error:
            cause = repr(error)
        admitted_at = self._running.pop(key)
        if cause:
            self._lose(task, key, cause, retry)
        else:
            self._lost_in_a_row = 0
            self._ready[key] = (admitted_at, group)
        self._admit()
        self._changed.set()

    def _lose(self, task: Task, key: int, cause: str, retry: bool) -> None:
        """Admit the task again, or give it up when that cannot help."""
        self.totals.lost += 1
        self._attempts[task] += 1
        self._lost_in_a_row += 1
        if self._lost_in_a_row > LOST_IN_A_ROW:
            raise RuntimeError(f"{self._lost_in_a_row} groups in a row were lost; the last: {cause}")
        if retry and self._attempts[task] < ATTEMPTS:
            log.warning("group %d (%s/%s) is lost and its task admitted again: %s", key, task.env, task.id, cause)
            self._again.append(task)
        else:
            log.error("task %s/%s is dropped: %s", task.env, task.id, cause)
            self.totals.dropped[task.id] = cause

    async def _next_batch(self) -> list[Expanded]:
        """Wait until a batch can be trained without pushing another group past the lag bound."""
        while True:
            self._admit()
            self._changed.clear()
            ready = [(key, admitted_at) for key, (admitted_at, _) in self._ready.items()]
            keys = self._admission.choose(self.version, ready, self._running.values())
            if keys is not None:
                return [self._ready.pop(key)[1] for key in keys]
            limit = self._config.runtime.group_timeout_s + 2 * GRACE_S  # a group is lost before this runs out
            async with bounded(limit, "waiting for a finished group", "runtime.group_timeout_s"):
                await self._changed.wait()

    async def _train(self, batch: list[Expanded]) -> tuple[dict[str, float], Counter[int]]:
        """Update on the batch's turn samples; expansions go on meanwhile."""
        self._training = len(batch)
        learned = await self._learner.update([group.samples for group in batch])
        summaries = [group.summary for group in batch]
        spans = spans_of(summaries)
        lags = lag_counts(spans, self.version)
        metrics = batch_metrics(summaries) | lag_metrics(
            summaries, lags, lag_counts(spans, self.update, self._updates_at), learned["updates"]
        )
        self.update += int(learned.pop("updates"))
        self._count(summaries, lags, learned)
        await self._record(self.version, self.update, [group.record for group in batch])
        return metrics | {f"learner/{name}": value for name, value in learned.items()}, lags

    async def _publish(self, batch: list[Expanded]) -> dict[str, float]:
        """Give the generators the new weights under the next version, and prove that they have them."""
        metrics = await publish(self._system.fleet, self._learner, self.version + 1)
        self.version += 1
        self._updates_at[self.version] = self.update
        self._training = 0  # only now: until the version moves, the batch still fills its place in the bound
        if self._config.runtime.check_publish:
            probes = [group.summary.probe for group in batch[:PROBES]]
            gap = await check_publish(self._system.fleet, self._learner, probes)
            self.totals.logprob_gap_max = max(self.totals.logprob_gap_max, gap["publish/logprob_gap"])
            metrics |= gap
            if self._config.model.dtype == "float32" and gap["publish/logprob_gap"] > GAP_MAX:
                raise RuntimeError(
                    f"after publish {self.version} engine and learner log-probs differ by "
                    f"{gap['publish/logprob_gap']:.2g} (at most {GAP_MAX} in float32): the engine serves other weights"
                )
        self._admit()
        return metrics

    def _count(self, summaries: list[GroupSummary], lags: Counter[int], learned: dict[str, float]) -> None:
        totals = self.totals
        totals.groups += len(summaries)
        totals.turn_samples += sum(summary.turns for summary in summaries)
        totals.tokens_generated += sum(summary.tokens for summary in summaries)
        totals.leaves_max = max([totals.leaves_max, *(summary.leaves for summary in summaries)])
        totals.branched_turns += sum(summary.branched_turns for summary in summaries)
        totals.digests_checked += int(learned.pop("digests_checked"))
        totals.digest_mismatches += int(learned.pop("digest_mismatches"))
        totals.lags.update(lags)
        for summary in summaries:
            totals.counters.update(summary.counters)
