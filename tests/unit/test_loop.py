"""The loop over doubles of coordinators, learner and generators: exactly once, bounded lag, losses admitted again."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from asyncrl.config.env import EnvConfig
from asyncrl.config.run import RunConfig
from asyncrl.config.runtime import RuntimeConfig
from asyncrl.config.tree import TreeConfig
from asyncrl.rollout.coordinator import GroupSummary
from asyncrl.rollout.coordinators import Expanded
from asyncrl.runtime.loop import ATTEMPTS, LOST_IN_A_ROW, Loop
from asyncrl.runtime.sampler import TaskSampler
from asyncrl.runtime.system import System
from asyncrl.track.base import Tracker
from asyncrl.types import Task


class World:
    """Doubles that share one policy version and one random stream."""

    def __init__(self, seed: int, loss_share: float = 0.0, leaves: int = 2) -> None:
        self.rng = random.Random(seed)
        self.loss_share, self.leaves = loss_share, leaves
        self.hopeless: dict[str, str] = {}
        self.served = 0
        self.paused = False
        self.trained: list[int] = []
        self.lags: list[int] = []
        self.expanding = self.most = 0

    async def pause_somewhat(self) -> None:
        for _ in range(self.rng.randrange(1, 30)):
            await asyncio.sleep(0)

    # Coordinators
    async def expand(self, task: Task, key: int) -> Expanded:
        self.expanding += 1
        self.most = max(self.most, self.expanding)
        first = self.served
        await self.pause_somewhat()
        self.expanding -= 1
        if self.rng.random() < self.loss_share:
            raise ConnectionError("the node vanished")
        if task.id in self.hopeless:
            return Expanded(summary(first, self.served, 0, {"lost": 2, self.hopeless[task.id]: 2}), [], {})
        return Expanded(summary(first, self.served, self.leaves, {"triggers": 1}), [key], {"key": key})

    # Learner
    async def update(self, batch: Sequence[Any]) -> dict[str, float]:
        for (key,) in batch:
            self.trained.append(key)
        await self.pause_somewhat()
        return {"updates": 1.0, "digests_checked": 1.0, "digest_mismatches": 0.0}

    async def send_weights(self) -> None:
        assert self.paused
        await self.pause_somewhat()

    async def logprobs(self, probes: Sequence[Any]) -> list[list[float]]:
        return [[-1.0] for _ in probes]

    # Generators
    async def pause(self) -> None:
        self.paused = True

    async def resume(self) -> None:
        self.paused = False

    async def update_weight_version(self, version: int) -> None:
        self.served = version

    async def score_everywhere(self, probes: Sequence[Any]) -> list[list[list[float]]]:
        return [[[-1.0 - 1e-4] for _ in probes]]


def summary(first: int, last: int, leaves: int, counters: dict[str, int]) -> GroupSummary:
    return GroupSummary(
        leaves=leaves, successes=1, turns=3, valid_turns=3, exploring_turns=1, branched_turns=1,
        leaf_turns_mean=2.0, tokens=30, prompt_tokens=90,
        spans={(first, last): 3}, counters=counters, seconds=0.1, probe=((1, 2), 1),
    )  # fmt: skip


def run(world: World, updates: int = 6, groups: int = 3, max_lag: int = 2) -> tuple[Loop, list[tuple[int, int, Any]]]:
    config = RunConfig(
        env=EnvConfig(name="pantry"),
        tree=TreeConfig(roots=2, leaves=4),
        runtime=RuntimeConfig(versions=updates, groups_per_batch=groups, max_lag=max_lag),
    )
    parts: Any = world
    system = System(parts, parts, parts)
    recorded: list[tuple[int, int, Any]] = []

    async def record(version: int, update: int, records: Sequence[Any]) -> None:
        recorded.append((version, update, list(records)))

    async def after_publish(version: int) -> None:
        assert version == world.served

    sampler = TaskSampler("pantry", [str(i) for i in range(7)], seed=0)
    loop = Loop(config, system, sampler, Tracker([]), record, after_publish)
    asyncio.run(asyncio.wait_for(loop.run(), 60))
    return loop, recorded


@pytest.mark.parametrize("max_lag", [0, 1, 2, 5])
@pytest.mark.parametrize("seed", range(5))
def test_every_admitted_group_is_trained_once_within_the_bound(max_lag: int, seed: int) -> None:
    world = World(seed)
    loop, recorded = run(world, max_lag=max_lag)
    assert sorted(world.trained) == list(range(18))
    assert max(loop.totals.lags) <= max_lag
    assert [version for version, _, _ in recorded] == list(range(6))
    assert [len(records) for _, _, records in recorded] == [3] * 6
    assert not world.paused


def test_groups_expand_while_the_learner_trains() -> None:
    world = World(0)
    run(world, max_lag=2)
    assert world.most > 3


def test_synchronous_mode_has_no_lag() -> None:
    world = World(1)
    loop, _ = run(world, max_lag=0)
    assert set(loop.totals.lags) == {0}
    assert world.most == 3


@pytest.mark.parametrize("seed", range(5))
def test_lost_groups_are_admitted_again_and_counted(seed: int) -> None:
    world = World(seed, loss_share=0.3)
    loop, recorded = run(world)
    tasks = Counter(key for _, _, records in recorded for key in (record["key"] for record in records))
    assert len(tasks) == 18
    assert set(tasks.values()) == {1}
    assert loop.totals.lost > 0


def test_a_group_short_of_leaves_is_not_trained() -> None:
    world = World(0, leaves=1)
    with pytest.raises(ExceptionGroup) as caught:
        run(world)
    assert "of at least 2 leaves ended" in str(caught.value.exceptions[0])
    assert world.trained == []


@pytest.mark.parametrize(("cause", "losses"), [("lost_env_worker", ATTEMPTS), ("lost_prompt_too_long", 1)])
def test_a_task_that_can_never_end_is_dropped_and_the_run_goes_on(cause: str, losses: int) -> None:
    world = World(0)
    world.hopeless = {"3": cause}
    loop, recorded = run(world)
    assert sum(len(records) for _, _, records in recorded) == 18
    assert list(loop.totals.dropped) == ["3"]
    assert cause in loop.totals.dropped["3"]
    assert loop.totals.lost >= losses  # the task comes again in a later pass, and is then tried once
    assert loop.totals.counters[cause] == 2 * loop.totals.lost


def test_engine_and_learner_that_disagree_after_a_publish_end_the_run() -> None:
    class Stale(World):
        async def score_everywhere(self, probes: Sequence[Any]) -> list[list[list[float]]]:
            return [[[-3.0] for _ in probes]]

    with pytest.raises(ExceptionGroup) as caught:
        run(Stale(0))
    assert "the engine serves other weights" in str(caught.value.exceptions[0])


def test_lag_is_measured_in_versions_and_in_updates() -> None:
    loop, _ = run(World(2), max_lag=2)
    assert loop.update == loop.version == 6


def test_a_run_that_only_loses_groups_gives_up_and_says_why() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        run(World(0, loss_share=1.0))
    assert f"{LOST_IN_A_ROW + 1} groups in a row" in str(caught.value.exceptions[0])
    assert "the node vanished" in str(caught.value.exceptions[0])


def test_the_sampler_gives_every_task_once_a_pass_whatever_the_order_of_asking() -> None:
    sampler = TaskSampler("pantry", ["a", "b", "c"], seed=4)
    inorder = [sampler.task(n).id for n in range(9)]
    assert [sorted(inorder[i : i + 3]) for i in (0, 3, 6)] == [["a", "b", "c"]] * 3
    again = TaskSampler("pantry", ["a", "b", "c"], seed=4)
    assert [again.task(n).id for n in (8, 0, 4)] == [inorder[8], inorder[0], inorder[4]]


def test_a_run_resumes_generation_after_a_failed_transfer() -> None:
    class Failing(World):
        async def send_weights(self) -> None:
            raise ConnectionError("the transfer broke")

    world = Failing(0)
    with pytest.raises(ExceptionGroup):
        run(world)
    assert not world.paused
