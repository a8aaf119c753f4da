"""The loop over doubles of coordinators, learner and generators: exactly once, bounded lag, losses admitted again."""

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from asyncrl.config.algo import AlgoConfig
from asyncrl.config.env import EnvConfig
from asyncrl.config.run import RunConfig
from asyncrl.config.runtime import RuntimeConfig
from asyncrl.config.tree import TreeConfig
from asyncrl.rollout.coordinators import Expanded
from asyncrl.rollout.summary import GroupSummary
from asyncrl.runtime.admission import Late
from asyncrl.runtime.ledger import GIVEN_UP, LATE, TRAINED
from asyncrl.runtime.loop import ATTEMPTS, Loop
from asyncrl.runtime.sampler import TaskSampler
from asyncrl.runtime.state import RunState
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

    async def send_weights(self, members: Sequence[int]) -> dict[int, str]:
        assert self.paused and members == [0]
        await self.pause_somewhat()
        return {}

    async def logprobs(self, probes: Sequence[Any]) -> list[list[float]]:
        return [[-1.0] for _ in probes]

    # Generators
    fenced: Sequence[int] = ()

    async def pause(self, members: object) -> list[int]:
        self.paused = True
        return [0]

    async def resume(self, members: object) -> None:
        self.paused = False

    def living(self) -> list[int]:
        return [0]

    async def update_weight_version(self, version: int, members: Sequence[int]) -> list[int]:
        self.served = version
        return list(members)

    async def score_everywhere(self, probes: Sequence[Any]) -> list[list[list[float]]]:
        return [[[-1.0 - 1e-4] for _ in probes]]


def summary(first: int, last: int, leaves: int, counters: dict[str, int]) -> GroupSummary:
    return GroupSummary(
        leaves=leaves, successes=1, turns=3, valid_turns=3, exploring_turns=1, branched_turns=1,
        leaf_turns=4, tokens=30, prompt_tokens=90,
        spans={(first, last): 3}, sibling_spreads={}, counters=counters, seconds=0.1,
        probe=((1, 2), 1), trained_tokens=1, digest="", thinking={},
    )  # fmt: skip


def ended(state: RunState, outcome: str) -> int:
    return sum(entry.outcome == outcome for entry in state.ledger)


def configuration(updates: int = 6, groups: int = 3, max_lag: int = 2, late: Late = "wait") -> RunConfig:
    return RunConfig(
        env=EnvConfig(name="pantry"),
        tree=TreeConfig(roots=2, leaves=4),
        algo=AlgoConfig(proximal="recomputed", weights="token") if late == "correct" else AlgoConfig(),
        runtime=RuntimeConfig(versions=updates, groups_per_batch=groups, max_lag=max_lag, late=late),
    )


def run(world: World, updates: int = 6, groups: int = 3, max_lag: int = 2, late: Late = "wait") -> tuple[RunState, Any]:
    recorded: list[tuple[int, int, Any]] = []
    saved: list[Saved] = []
    state = RunState()
    loop = loop_over(world, configuration(updates, groups, max_lag, late), state, recorded, saved)
    asyncio.run(asyncio.wait_for(loop.run(), 60))
    return state, recorded


Saved = tuple[str, dict[int, Expanded], int]
"""What a checkpoint holds: state as JSON text, ready groups, and how many batches were recorded."""


def loop_over(world: World, config: RunConfig, state: RunState, recorded: list[Any], saved: list[Saved]) -> Loop:
    parts: Any = world

    async def record(version: int, update: int, records: Sequence[Any]) -> None:
        recorded.append((version, update, list(records)))

    async def after_publish(version: int) -> None:
        assert version == world.served
        await world.pause_somewhat()
        saved.append(
            (json.dumps(state.to_json()), {key: ready.group for key, ready in state.ready.items()}, len(recorded))
        )

    sampler = TaskSampler("pantry", [str(i) for i in range(7)], seed=0)
    return Loop(config, System(parts, parts, parts, parts), sampler, Tracker([]), state, record, after_publish)


@pytest.mark.parametrize("max_lag", [0, 1, 2, 5])
@pytest.mark.parametrize("seed", range(5))
def test_every_admitted_group_is_trained_once_within_the_bound(max_lag: int, seed: int) -> None:
    world = World(seed)
    state, recorded = run(world, max_lag=max_lag)
    assert sorted(world.trained) == list(range(18))
    assert max(state.totals.lags) <= max_lag
    assert [entry.position for entry in sorted(state.ledger, key=lambda e: e.position)] == list(range(18))
    assert [version for version, _, _ in recorded] == list(range(6))
    assert [len(records) for _, _, records in recorded] == [3] * 6
    assert not world.paused


def test_groups_expand_while_the_learner_trains() -> None:
    world = World(0)
    run(world, max_lag=2)
    assert world.most > 3


def test_synchronous_mode_has_no_lag() -> None:
    world = World(1)
    state, _ = run(world, max_lag=0)
    assert set(state.totals.lags) == {0}
    assert world.most == 3


@pytest.mark.parametrize("seed", range(5))
def test_lost_groups_are_admitted_again_and_counted(seed: int) -> None:
    world = World(seed, loss_share=0.3)
    state, recorded = run(world)
    tasks = Counter(key for _, _, records in recorded for key in (record["key"] for record in records))
    assert len(tasks) == 18
    assert set(tasks.values()) == {1}
    assert state.totals.lost > 0


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
    state, recorded = run(world)
    assert sum(len(records) for _, _, records in recorded) == 18
    given_up = [entry for entry in state.ledger if entry.outcome == GIVEN_UP]
    assert {entry.task for entry in given_up} == {"3"}
    assert all(cause in entry.cause for entry in given_up)
    assert state.totals.lost == losses * len(given_up)
    assert state.totals.counters[cause] == 2 * state.totals.lost


def test_engine_and_learner_that_disagree_after_a_publish_end_the_run() -> None:
    class Stale(World):
        async def score_everywhere(self, probes: Sequence[Any]) -> list[list[list[float]]]:
            return [[[-3.0] for _ in probes]]

    with pytest.raises(ExceptionGroup) as caught:
        run(Stale(0))
    assert "the engine serves other weights" in str(caught.value.exceptions[0])


def test_a_publish_whose_probes_nobody_scores_is_told_and_the_run_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    class Busy(World):
        async def score_everywhere(self, probes: Sequence[Any]) -> list[list[list[float]]]:
            raise RuntimeError("no generator scored the probes: too busy")

    state, _ = run(Busy(0))
    assert "publish 1 is not checked: no generator scored the probes: too busy" in caplog.text
    assert (state.version, state.totals.logprob_gap_max) == (6, 0.0)


def test_the_check_of_a_publish_goes_on_beside_the_next_batch_and_ends_before_the_next_publish() -> None:
    events: list[str] = []

    class Slow(World):
        async def score_everywhere(self, probes: Sequence[Any]) -> list[list[list[float]]]:
            for _ in range(200):  # longer than any wait or update
                await asyncio.sleep(0)
            events.append("checked")
            return [[[-1.0] for _ in probes]]

        async def update(self, batch: Sequence[Any]) -> dict[str, float]:
            events.append("update")
            return await super().update(batch)

        async def pause(self, members: object) -> list[int]:
            events.append("publish")
            return await super().pause(members)

    run(Slow(0))
    assert events[:5] == ["update", "publish", "update", "checked", "publish"]


def test_lag_is_measured_in_versions_and_in_updates() -> None:
    state, _ = run(World(2), max_lag=2)
    assert state.update == state.version == 6


def test_a_run_that_only_loses_groups_gives_up_and_says_why() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        run(World(0, loss_share=1.0))
    assert re.search(r"\d+ groups in a row were lost", str(caught.value.exceptions[0]))
    assert "the node vanished" in str(caught.value.exceptions[0])


def test_the_sampler_gives_every_task_once_a_pass_whatever_the_order_of_asking() -> None:
    sampler = TaskSampler("pantry", ["a", "b", "c"], seed=4)
    inorder = [sampler.task(n).id for n in range(9)]
    assert [sorted(inorder[i : i + 3]) for i in (0, 3, 6)] == [["a", "b", "c"]] * 3
    again = TaskSampler("pantry", ["a", "b", "c"], seed=4)
    assert [again.task(n).id for n in (8, 0, 4)] == [inorder[8], inorder[0], inorder[4]]


def test_a_run_resumes_generation_after_a_failed_transfer() -> None:
    class Failing(World):
        async def send_weights(self, members: Sequence[int]) -> dict[int, str]:
            raise ConnectionError("the transfer broke")

    world = Failing(0)
    with pytest.raises(ExceptionGroup):
        run(world)
    assert not world.paused


@pytest.mark.parametrize("seed", range(12))
def test_a_run_that_is_ended_anywhere_goes_on_from_its_checkpoint_and_trains_every_task_once(seed: int) -> None:
    rng = random.Random(seed)
    recorded: list[tuple[int, int, Any]] = []
    saved: list[Saved] = [(json.dumps(RunState().to_json()), {}, 0)]
    config = configuration(max_lag=rng.randrange(4))
    ends = 0

    async def lead(state: RunState) -> bool:
        world = World(rng.randrange(2**31), loss_share=0.1)
        world.served = state.version
        going = asyncio.ensure_future(loop_over(world, config, state, recorded, saved).run())
        for _ in range(rng.randrange(90)):
            await asyncio.sleep(0)
        if going.done():
            going.result()
            return True
        going.cancel()
        await asyncio.wait([going])
        return False

    while True:
        text, groups, batches = saved[-1]
        del recorded[batches:]  # what came after the checkpoint is not of its lineage
        state = RunState.from_json(json.loads(text), groups)
        if asyncio.run(lead(state)):
            break
        ends += 1
        assert ends < 5000
    assert ends > 1
    assert sorted(entry.position for entry in state.ledger) == list(range(len(state.ledger.entries)))
    trained = [entry.key for entry in state.ledger if entry.outcome == TRAINED]
    assert len(trained) == 18 and len(state.ledger.entries) - 18 == ended(state, GIVEN_UP)
    assert sorted(trained) == sorted(record["key"] for _, _, records in recorded for record in records)
    assert max(state.totals.lags) <= config.runtime.lag_bound


@pytest.mark.parametrize("late", ["drop", "correct"])
def test_a_straggler_is_dropped_or_trained_late_without_holding_the_others(late: Late) -> None:
    class Straggling(World):
        async def expand(self, task: Task, key: int) -> Expanded:
            first = self.served
            while key == 1 and self.served < 4:
                await asyncio.sleep(0)
            group = await super().expand(task, key)
            return replace(group, summary=summary(first, self.served, 2, {"triggers": 1}))

    state, _ = run(Straggling(0), max_lag=1, late=late)
    (entry,) = [entry for entry in state.ledger if entry.key == 1]
    assert len(state.ledger.entries) == 18 + (late == "drop")
    assert ended(state, TRAINED) == 18
    assert entry.outcome == (LATE if late == "drop" else TRAINED)
    assert (max(state.totals.lags) > 1) == (late == "correct")


def test_the_ledger_refuses_a_task_that_is_trained_twice() -> None:
    state, _ = run(World(0))
    with pytest.raises(RuntimeError, match="was trained at version"):
        state.ledger.add(next(iter(state.ledger)))
