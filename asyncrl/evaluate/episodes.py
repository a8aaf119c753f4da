"""Evaluation episodes: chains at the evaluation temperature, every task of a split once or several times.

Invariants: a lost episode is in no share; keys are negative and never meet a training group's.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ray.exceptions import RayError

from asyncrl.engine.base import brief, cause_of
from asyncrl.rollout.coordinator import EpisodeLost
from asyncrl.rollout.coordinators import CoordinatorDied, Coordinators
from asyncrl.rollout.summary import GroupSummary, Tally
from asyncrl.types import Task

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EvalReport:
    """Shares over the finished episodes; ``lost`` episodes (infrastructure) are left out of them and counted."""

    episodes: int
    lost: int
    success: float
    success_low: float
    success_high: float
    """95 % Wilson interval of ``success``."""
    valid_turns: float
    """Share of turns whose output keeps the format."""
    turns_mean: float
    tokens_mean: float

    def metrics(self) -> dict[str, float]:
        return {f"eval/{name}": float(getattr(self, name)) for name in self.__slots__}


async def evaluate(coordinators: Coordinators, tasks: Sequence[Task], at_once: int, episodes: int = 1) -> EvalReport:
    """Run ``episodes`` of every task and report shares; an episode that infrastructure ends is lost, not failed.

    ``at_once``: episodes in flight, at most one an environment slot: time in a queue would count against its limit.
    """
    total, done = len(tasks) * episodes, 0
    free = asyncio.Semaphore(at_once)

    async def episode(task: Task, key: int) -> GroupSummary | EpisodeLost:
        nonlocal done
        async with free:
            try:
                return await coordinators.evaluate(task, key)
            except (CoordinatorDied, RayError, TimeoutError) as error:
                lost = cause_of(error)
                if not isinstance(lost, EpisodeLost):
                    lost = EpisodeLost(type(lost).__name__, brief(error))
                log.warning("an evaluation episode of %s/%s is lost: %s, %s", task.env, task.id, *lost.args)
                return lost
            finally:
                done += 1
                if done * 5 // total > (done - 1) * 5 // total:  # every fifth of them
                    log.info("evaluation: %d of %d episodes", done, total)

    # Keys below zero cannot meet those of training groups.
    jobs = zip([task for task in tasks for _ in range(episodes)], range(-1, -1 - total, -1), strict=True)
    return report(await asyncio.gather(*(episode(*job) for job in jobs)))


def report(outcomes: Sequence[GroupSummary | EpisodeLost]) -> EvalReport:
    """Raises RuntimeError when every episode was lost, with the commonest causes."""
    from scipy.stats import binomtest  # takes a second to import, and only a report needs it

    losses = [outcome.args for outcome in outcomes if isinstance(outcome, EpisodeLost)]
    tally = Tally.of(outcome for outcome in outcomes if not isinstance(outcome, EpisodeLost))
    if not tally.groups:
        last = dict(losses)
        common = Counter(kind for kind, _ in losses).most_common(3)
        causes = "; ".join(f"{count} by {kind}, at last: {last[kind]}" for kind, count in common)
        raise RuntimeError(f"evaluation: all {len(outcomes)} episodes were lost, {causes}")
    interval = binomtest(tally.successes, tally.leaves).proportion_ci(method="wilson")
    return EvalReport(
        episodes=tally.groups,
        lost=len(losses),
        success=tally.success,
        success_low=float(interval.low),
        success_high=float(interval.high),
        valid_turns=tally.valid,
        turns_mean=tally.leaf_turns_mean,
        tokens_mean=tally.tokens / tally.groups,
    )
