"""The asynchronous loop, as a person would tell it: admit, expand, score, batch, update, publish, record.

Invariants: there is no barrier across tasks; while the learner trains a batch, other groups go on and new ones are
admitted as far as the lag bound allows (``admission.py``); a task taken from the sampler is trained once, or entered in
the ledger with the reason why not; the driver holds numbers and references, the bulk stays in the object store.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

from asyncrl.config.run import RunConfig
from asyncrl.engine.fleet import GeneratorDied
from asyncrl.engine.waits import bounded, now
from asyncrl.learner.group import LearnerGroup
from asyncrl.rollout.coordinators import GRACE_S
from asyncrl.runtime.admission import Admission
from asyncrl.runtime.ledger import GIVEN_UP, LATE
from asyncrl.runtime.measure import batch_metrics, lag_figures, thinking_figures
from asyncrl.runtime.publish import logprob_gap, publish
from asyncrl.runtime.sampler import TaskSampler
from asyncrl.runtime.state import Attempt, RunState
from asyncrl.runtime.system import System
from asyncrl.track.base import Tracker
from asyncrl.types import Probe

log = logging.getLogger(__name__)

ATTEMPTS = 3
"""How often a task is admitted before it is given up with its cause."""
LOST_IN_A_ROW = 3
"""How often all that may be in progress is lost, without a finished group between, before the run gives up."""
GAP_MAX, GAP_MAX_GPU = 1e-2, 0.25
"""Largest difference of log-probs at equal float32 weights; a GPU's engine multiplies in TF32, of 10 bits."""
REFIT_S = 30.0
"""How long a batch is waited for before generators that missed the last publish are served again; then twice that."""
PROBES = 4
"""Turns whose log-probs are compared after a publish."""


@dataclass(eq=False)
class Loop:
    """One training run over a started system."""

    config: RunConfig
    system: System
    sampler: TaskSampler
    tracker: Tracker
    state: RunState
    """Where to go on; a new one begins at version 0."""
    record: Callable[[int, int, Sequence[Any]], Awaitable[None]]
    """Called once a batch with (version, update, record references)."""
    after_publish: Callable[[int], Awaitable[None]]
    """Called with the new version after each publish: evaluation, checkpoints."""

    def __post_init__(self) -> None:
        self._learner = cast(LearnerGroup, self.system.learner)
        runtime = self.config.runtime
        self._admission = Admission(runtime.groups_per_batch, runtime.lag_bound, runtime.late)
        self._expanding: dict[int, tuple[asyncio.Task[None], float]] = {}
        """By key: the expansion, and when it began."""
        self._blocked_since: float | None = None
        self._lost_in_a_row = 0
        self._check: asyncio.Task[None] | None = None
        """The last publish's comparison of log-probs, which goes on beside the next batch."""
        self._changed = asyncio.Event()

    async def run(self) -> None:
        state = self.state
        async with asyncio.TaskGroup() as self._expansions:
            while state.version < self.config.runtime.versions:
                times = [now()]
                await self._next_batch()
                times.append(now())
                learned, metrics, histograms = await self._train()
                times.append(now())
                metrics |= await self._publish(learned)
                times.append(now())
                for name, (start, end) in zip(("wait", "update", "publish"), pairwise(times), strict=True):
                    metrics[f"time/{name}_s"] = end - start
                    state.seconds[name] += end - start
                self.tracker.log(state.version, metrics, histograms)
                self._admit()
                blocked = state.seconds["admission_blocked"]
                await self.after_publish(state.version)
                self._admit()
                state.seconds["admission_blocked"] = blocked  # what an evaluation holds up is not the bound's doing

    def _admit(self) -> None:
        """Start tasks as far as the lag bound allows; no more than the run will train."""
        state, runtime = self.state, self.config.runtime
        wanted = (runtime.versions - state.version) * runtime.groups_per_batch
        while state.outstanding < wanted and self._admission.may_admit(state.outstanding):
            attempt = state.admit(self.sampler.task)
            expansion = self._expansions.create_task(self._expand(attempt))
            self._expanding[attempt.key] = expansion, now()
        self._note_blocked(state.outstanding < wanted)

    def _note_blocked(self, blocked: bool) -> None:
        """Count the time in which the bound, not the end of the run, keeps another task from starting."""
        at = now()
        if self._blocked_since is not None:
            self.state.seconds["admission_blocked"] += at - self._blocked_since
        self._blocked_since = at if blocked else None

    async def _expand(self, attempt: Attempt) -> None:
        """Grow the task's forest; keep the group until it is trained, or admit the task again."""
        cause, retry = "", True
        try:
            group = await self.system.coordinators.expand(attempt.task, attempt.key)
            counters, roots = group.summary.counters, self.config.tree.roots
            if group.summary.leaves < roots:
                losses = {name: count for name, count in counters.items() if name.startswith("lost_") and count}
                cause = f"only {group.summary.leaves} of at least {roots} leaves ended: {losses}"
                retry = not counters.get("lost_prompt_too_long")
                self.state.totals.counters.update(counters)
        except Exception as error:
            cause = repr(error)
        if attempt.key not in self._expanding:  # given up in the moment in which it ended
            return
        if cause:
            self._lose(attempt, cause, retry)
        else:
            del self._expanding[attempt.key]
            self._lost_in_a_row = 0
            self.state.complete(attempt.key, group)
        self._admit()
        self._changed.set()

    def _lose(self, attempt: Attempt, cause: str, retry: bool) -> None:
        """Admit the task again, or give it up when that cannot help."""
        self.state.totals.lost += 1
        self._lost_in_a_row += 1
        if self._lost_in_a_row > LOST_IN_A_ROW * self._admission.most:
            raise RuntimeError(f"{self._lost_in_a_row} groups in a row were lost; the last: {cause}")
        if retry and attempt.number < ATTEMPTS:
            log.warning("%s is lost and its task admitted again: %s", _name(attempt), cause)
            del self._expanding[attempt.key]
            self.state.admit_again(attempt.key)
        else:
            self._give_up(attempt, GIVEN_UP, cause)

    def _give_up(self, attempt: Attempt, outcome: str, cause: str) -> None:
        log.error("%s is given up: %s", _name(attempt), cause)
        expansion, began = self._expanding.pop(attempt.key)
        if outcome == LATE:
            expansion.cancel()
        self.state.give_up(attempt.key, outcome, cause, now() - began)

    async def _next_batch(self) -> None:
        """Wait until a batch can be trained without pushing another group past the lag bound, and take it."""
        state, patience = self.state, REFIT_S
        while True:
            self._admit()
            self._changed.clear()
            ready = [(key, group.attempt.admitted_at) for key, group in state.ready.items()]
            running = [(key, attempt.admitted_at) for key, attempt in state.running.items()]
            choice = self._admission.choose(state.version, ready, running)
            if choice is not None:
                for key in choice.dropped:
                    self._give_up(state.running[key], LATE, f"not done within {self._admission.max_lag} versions")
                return state.take(choice.batch)
            if self.system.fleet.fenced:
                try:
                    async with asyncio.timeout(patience):
                        await self._changed.wait()
                except TimeoutError:
                    await self._refit()
                    patience *= 2
                continue
            limit = self.config.runtime.group_timeout_s + 2 * GRACE_S  # a group is lost before this runs out
            async with bounded(limit, "waiting for a finished group", "runtime.group_timeout_s"):
                await self._changed.wait()

    async def _refit(self) -> None:
        """Serve those that missed the last publish: the others may be dead or slow by now; then no batch would come,
        and so no next publish."""
        fleet = self.system.fleet
        try:
            await publish(fleet, self._learner, self.state.version, fleet.fenced)
        except GeneratorDied:
            raise
        except RuntimeError as error:  # fenced still, until this or the next publish serves them
            log.warning("refitting fenced generators: %s", error)

    async def _train(self) -> tuple[dict[str, float], dict[str, float], dict[str, list[float]]]:
        """Update on the batch's turn samples, and record it; expansions go on meanwhile.

        Returns the learner's figures; metrics; histograms.
        """
        state, groups = self.state, [ready.group for ready in self.state.training]
        learned = await self._learner.update([group.samples for group in groups])
        trained = [(ready.group.summary, ready.done) for ready in state.training]
        steps = self.config.learner.updates_per_batch
        metrics, histograms = lag_figures(trained, state.version, state.update, state.updates_at, steps)
        await self.record(state.version, state.update + int(learned["updates"]), [group.record for group in groups])
        thinking, more = thinking_figures([group.summary for group in groups])
        metrics |= batch_metrics(group.summary for group in groups) | thinking
        return learned, metrics | {f"learner/{name}": value for name, value in learned.items()}, histograms | more

    async def _publish(self, learned: Mapping[str, float]) -> dict[str, float]:
        """Give the generators the new weights under the next version, and prove that they have them."""
        state = self.state
        probes = [ready.group.summary.probe for ready in state.training[:PROBES]]
        if self._check is not None:
            await asyncio.wait([self._check])  # it is about the weights that go now
        metrics = await publish(self.system.fleet, self._learner, state.version + 1)
        state.publish(learned)
        if self.config.runtime.check_publish:
            ours = await self._learner.logprobs(probes)
            self._check = self._expansions.create_task(self._check_publish(state.version, probes, ours))
        return metrics | state.ledger.bias()

    async def _check_publish(self, version: int, probes: Sequence[Probe], ours: list[list[float]]) -> None:
        try:
            figures = logprob_gap(ours, await self.system.fleet.score_everywhere(probes))
        except RuntimeError as error:
            log.warning("publish %d is not checked: %s", version, error)
            return
        self.tracker.log(version, figures)
        gap, totals = figures["publish/logprob_gap"], self.state.totals
        totals.logprob_gap_max = max(totals.logprob_gap_max, gap)
        most = GAP_MAX_GPU if self.config.engine.gpus else GAP_MAX
        if self.config.model.dtype == "float32" and gap > most:
            raise RuntimeError(
                f"after publish {version} engine and learner log-probs differ by {gap:.2g} "
                f"(at most {most} in float32): the engine serves other weights"
            )


def _name(attempt: Attempt) -> str:
    return f"group {attempt.key} ({attempt.task.env}/{attempt.task.id}, attempt {attempt.number})"
