"""Expansion over doubles of the engine and the slots: budget, branching after the action, verified children, losses."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from asyncrl.config.env import EnvConfig
from asyncrl.config.run import RunConfig
from asyncrl.config.thinking import ThinkingConfig
from asyncrl.config.tree import TreeConfig
from asyncrl.engine.fleet import GenerationFailed
from asyncrl.env import Env, Trace, replay
from asyncrl.rollout.expansion import REBUILDS, Expansion, Site
from asyncrl.rollout.slot import SlotLost
from asyncrl.text.prompt import PromptTooLong
from asyncrl.tree.criteria import make_criterion
from asyncrl.tree.forest import Forest
from asyncrl.types import Generation, Group, Observation, Sampling, Signals, Step, Task, VersionSpan, token_digest

TASK = Task("counter", "0")
MUMBLE = 4
"""The token of a response without an action."""


class Counter(Env):
    """Counts its actions; ends after ``limit`` of them."""

    role: ClassVar[str] = "You count."
    max_turns: ClassVar[int] = 50
    copies: ClassVar[bool] = True

    def __init__(self, limit: int = 5) -> None:
        self.limit, self.seen = limit, ""

    @classmethod
    def tasks(cls, split: str) -> Sequence[str]:
        return ["0"]

    def reset(self, task: Task) -> Observation:
        self.seen = ""
        return Observation("", goal="count")

    def step(self, action: str) -> Step:
        self.seen += action
        done = len(self.seen) >= self.limit
        return Step(Observation(self.seen, goal="count"), float(done), done, False, {"success": done} if done else {})

    def list_actions(self) -> tuple[str, ...]:
        return ("a", "b")

    def snapshot(self) -> str:
        return self.seen

    def restore(self, snapshot: str) -> Observation:
        self.seen = snapshot
        return Observation(self.seen, goal="count")


class Drifting(Counter):
    """Every reset of one process gives another world: its replays must all be caught."""

    resets: ClassVar[int] = 0

    def step(self, action: str) -> Step:
        step = super().step(action)
        return step._replace(observation=Observation(f"{self.seen} in world {self.world}", goal="count"))

    def reset(self, task: Task) -> Observation:
        Drifting.resets += 1
        self.world = Drifting.resets
        return super().reset(task)


class Tracked(Counter):
    """Every state that was restored is marked where only a record can tell."""

    def restore(self, snapshot: str) -> Observation:
        return replace(super().restore(snapshot), anchor="restored")


class LocalSlot:
    """A slot without an actor; each method fails as often as ``failures`` says."""

    own = True

    def __init__(self, env: Env, failures: dict[str, int]) -> None:
        self.env, self._failures = env, failures
        self.released = False

    async def _perhaps_fail(self, method: str) -> None:
        await asyncio.sleep(0)
        if self._failures.get(method, 0) > 0:
            self._failures[method] -= 1
            self.released = True  # a lost slot needs no release
            raise SlotLost("the worker died", own=self.own)

    async def reset(self, task: Task) -> Observation:
        await self._perhaps_fail("reset")
        return self.env.reset(task)

    async def step(self, action: str) -> Step:
        await self._perhaps_fail("step")
        return self.env.step(action)

    async def snapshot(self) -> Any:
        return self.env.snapshot()

    async def restore(self, snapshot: Any) -> Observation:
        await self._perhaps_fail("restore")
        return self.env.restore(snapshot)

    async def list_actions(self) -> tuple[str, ...] | None:
        return self.env.list_actions()

    async def replay(self, trace: Trace, actions_at_fork: tuple[str, ...] | None) -> Observation:
        await self._perhaps_fail("replay")
        return replay(self.env, trace, actions_at_fork)

    def release(self) -> None:
        self.released = True


class Neighbours(LocalSlot):
    """A slot whose worker others bring down."""

    own = False


class Prompts:
    """Ids are the length of the history; a response id is 2 * letter + (1 if it explores)."""

    def __init__(self, longest: int = 100) -> None:
        self._longest = longest

    def encode(self, observation: Observation, history: Sequence[tuple[Observation, str]]) -> list[int]:
        if len(history) >= self._longest:
            raise PromptTooLong("the prompt is too long")
        return [1 + len(history)]

    def decode(self, ids: Sequence[int]) -> str:
        if ids[0] == MUMBLE:
            return "hm"
        tag = "explore" if ids[0] % 2 else "think"
        return f"<{tag}>so</{tag}><action>{'ab'[ids[0] // 2]}</action>"


class Policy:
    """Explores with probability ``p``; answers out of order; fails once every ``fails`` calls."""

    def __init__(self, p: float, seed: int = 0, fails: int = 0) -> None:
        self._p, self._rng, self._fails, self.calls = p, random.Random(seed), fails, 0

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, key: str, near: str) -> Generation:
        self.calls += 1
        for _ in range(self._rng.randrange(3)):
            await asyncio.sleep(0)
        if self._fails and self.calls % self._fails == 0:
            raise GenerationFailed("no engine answered")
        token = 2 * self._rng.randrange(2) + (self._rng.random() < self._p)
        return Generation((token,), (-0.5,), (VersionSpan(0, 0, 1),), "stop", token_digest([token]))


class Mumbling(Policy):
    """Says nothing that could be executed in a fifth of its turns."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, key: str, near: str) -> Generation:
        generation = await super().generate(prompt_ids, sampling, key, near)
        return replace(generation, token_ids=(MUMBLE,)) if self._rng.random() < 0.2 else generation


class Wavering(Policy):
    """Each turn's signal is one of three, and told from all others by a ten-millionth; all calls are kept by key."""

    def __init__(self, seed: int) -> None:
        super().__init__(0.5, seed)
        self.phis: dict[str, float] = {}

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, key: str, near: str) -> Generation:
        generation = await super().generate(prompt_ids, sampling, key, near)
        phi = self._rng.choice([0.1, 0.1005, 0.3]) + 1e-7 * len(self.phis)
        assert key not in self.phis
        self.phis[key] = phi
        return replace(generation, signals=Signals(phi, 0.0, 0.0, 0.0, 1, "", (0, 0)))


def expansion_of(
    env: type[Env] = Counter, limit: int = 5, p: float = 0.5, copies: bool = True, seed: int = 0, fails: int = 0,
    failures: dict[str, int] | None = None, slot: type[LocalSlot] = LocalSlot, longest: int = 100,
    policy: Any = None, tds: ThinkingConfig | None = None, void_ends: bool = False,
) -> tuple[Expansion, list[LocalSlot]]:  # fmt: skip
    tree = TreeConfig(roots=2, branch=2, leaves=6)
    slots: list[LocalSlot] = []
    left = dict(failures or {})

    async def acquire() -> Any:
        slots.append(slot(env(limit=limit) if issubclass(env, Counter) else env(), left))
        return slots[-1]

    config = RunConfig(env=EnvConfig(name="counter"), tree=tree)
    policy = policy or Policy(p, seed, fails)
    prompts: Any = Prompts(longest)
    site = Site(config, policy, acquire, prompts, copies_itself=copies, max_turns=20)
    rng = random.Random(seed)
    forest = Forest(TASK, 0, tree, rng)
    return Expansion(site, forest, make_criterion(tree, rng), Sampling(1.0, 8), tds, void_ends), slots


def grow(**options: Any) -> tuple[Group, list[LocalSlot]]:
    expansion, slots = expansion_of(**options)
    return asyncio.run(expansion.grow()), slots


@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_leaves_stay_between_roots_and_budget(copies: bool, seed: int) -> None:
    group, slots = grow(copies=copies, seed=seed)
    assert 2 <= len(group.leaves) <= 6
    assert group.counters["branches_verified"] == len(group.leaves) - 2
    assert all(slot.released for slot in slots)


def test_always_exploring_fills_the_budget_exactly() -> None:
    group, _ = grow(p=1.0, limit=8)
    assert len(group.leaves) == 6


def test_a_child_starts_after_the_exploring_action() -> None:
    group, _ = grow(p=1.0, limit=8)
    by_id = {node.id: node for node in group.nodes}
    for node in group.nodes:
        if node.parent is not None:
            parent = by_id[node.parent].turn
            assert node.turn.observation.text == parent.observation.text + parent.parsed.action


def test_every_leaf_path_is_one_episode() -> None:
    group, _ = grow(p=0.7, limit=6, seed=3)
    for leaf in group.leaves:
        path = group.path(leaf)
        assert len(path) == 6
        assert [node.depth for node in path] == list(range(6))
        assert path[-1].turn.terminated


def test_children_that_cannot_be_verified_are_dropped_and_counted() -> None:
    group, slots = grow(env=Drifting, p=1.0, copies=False, limit=6)
    assert len(group.leaves) == 2
    assert group.counters["replay_mismatches"] == group.counters["discarded"] > 0
    assert group.counters.get("branches_verified", 0) == 0
    assert all(slot.released for slot in slots)


def test_a_dead_worker_is_rebuilt_by_replay_and_never_scored_zero() -> None:
    group, _ = grow(p=0.0, failures={"step": 3})
    assert group.counters["rebuilds"] == 3
    assert len(group.leaves) == 2
    assert all(leaf.success for leaf in group.leaves)


def test_a_leaf_whose_environment_cannot_be_kept_is_lost_not_scored() -> None:
    group, slots = grow(p=0.0, failures={"step": 10**9})
    assert group.leaves == []
    assert group.counters["lost_env_worker"] == 2
    assert len(slots) < 20


def test_failing_generations_lose_leaves_and_give_back_children() -> None:
    group, _ = grow(p=1.0, fails=4, limit=6, seed=1)
    assert all(leaf.success for leaf in group.leaves)
    assert group.counters["lost"] + group.counters["discarded"] > 0
    assert len(group.leaves) <= 6


def test_a_neighbours_failures_are_not_charged() -> None:
    group, slots = grow(p=0.0, failures={"step": 20 * REBUILDS}, slot=Neighbours)
    assert group.counters["rebuilds"] == 20 * REBUILDS
    assert len(group.leaves) == 2 and all(leaf.success for leaf in group.leaves)
    assert all(slot.released for slot in slots)


def test_a_root_begins_elsewhere_when_its_worker_is_lost_in_reset() -> None:
    group, slots = grow(p=0.0, failures={"reset": REBUILDS})
    assert len(group.leaves) == 2 and group.counters["lost"] == 0
    group, slots = grow(p=0.0, failures={"reset": 10**9})
    assert group.leaves == [] and group.counters["lost_env_worker"] == 2
    assert len(slots) == 2 * (REBUILDS + 1)


@pytest.mark.parametrize(("copies", "method"), [(True, "restore"), (False, "replay")])
def test_a_child_begins_elsewhere_when_its_worker_is_lost(copies: bool, method: str) -> None:
    group, _ = grow(p=1.0, limit=8, copies=copies, failures={method: REBUILDS})
    assert len(group.leaves) == 6 and group.counters["branches_verified"] == 4
    group, slots = grow(p=1.0, limit=8, copies=copies, failures={method: 10**9})
    assert len(group.leaves) == 2
    assert group.counters["discarded_env_worker"] == group.counters["discarded"] > 0
    assert all(slot.released for slot in slots)


def test_a_childs_first_turn_records_what_the_child_saw() -> None:
    group, _ = grow(env=Tracked, p=1.0, limit=8)
    restored = [node for node in group.nodes if node.turn.observation.anchor == "restored"]
    assert len(restored) == group.counters["branches_verified"] == 4
    siblings = [{node.parent for node in group.nodes if node is not child} for child in restored]
    assert all(child.parent in parents for child, parents in zip(restored, siblings, strict=True))


@pytest.mark.parametrize("method", ["reset", "restore", "replay", "step"])
def test_cancellation_gives_every_slot_back(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group's time limit strikes while some slot is within ``method``."""

    async def main() -> list[LocalSlot]:
        expansion, slots = expansion_of(p=1.0, limit=8, copies=method != "replay")
        entered = asyncio.Event()

        async def hang(*_: Any) -> None:
            entered.set()
            await asyncio.sleep(10)

        monkeypatch.setattr(LocalSlot, method, hang)
        growing = asyncio.create_task(expansion.grow())
        await asyncio.wait_for(entered.wait(), 5)
        growing.cancel()
        await asyncio.gather(growing, return_exceptions=True)
        return slots

    slots = asyncio.run(main())
    assert slots and all(slot.released for slot in slots)


def test_a_first_prompt_that_is_too_long_is_counted_as_the_tasks_own() -> None:
    group, slots = grow(longest=0)
    assert group.leaves == []
    assert group.counters["lost_prompt_too_long"] == group.counters["prompt_too_long"] == group.counters["lost"] == 2
    assert all(slot.released for slot in slots)


def test_a_later_prompt_that_is_too_long_ends_the_episode() -> None:
    group, _ = grow(p=0.0, longest=3)
    assert [leaf.end for leaf in group.leaves] == ["turn_limit"] * 2
    assert (group.counters["prompt_too_long"], group.counters["lost_prompt_too_long"]) == (2, 0)


class Clock(asyncio.SelectorEventLoop):
    """A loop whose time moves only when told."""

    seconds = 0.0

    def time(self) -> float:
        return self.seconds


def test_durations_are_those_of_the_loops_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step takes a second of it, every restored child a quarter more."""
    step, restore = LocalSlot.step, LocalSlot.restore

    def passing(call: Any, seconds: float) -> Any:
        async def slow(self: LocalSlot, *args: Any) -> Any:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, Clock)
            loop.seconds += seconds
            return await call(self, *args)

        return slow

    monkeypatch.setattr(LocalSlot, "step", passing(step, 1))
    monkeypatch.setattr(LocalSlot, "restore", passing(restore, 0.25))
    expansion, _ = expansion_of(p=1.0, limit=8)
    with asyncio.Runner(loop_factory=Clock) as runner:
        group = runner.run(expansion.grow())
    children = group.counters["branches_verified"]
    assert group.seconds == len(group.nodes) + 0.25 * children
    assert group.counters["branch_restore_ms"] >= 250 * children > 0


def test_the_last_loss_says_what_and_why() -> None:
    expansion, _ = expansion_of(p=0.0, failures={"reset": 10**9})
    asyncio.run(expansion.grow())
    assert expansion.last_loss == ("env_worker", "the environment was lost 4 times, at last: the worker died")


@pytest.mark.parametrize("seed", range(6))
def test_turns_that_repeat_the_last_one_are_sampled_again(seed: int) -> None:
    tds, policy = ThinkingConfig(tds=True, eta=0.01, max_resamples=2), Wavering(seed)
    group, _ = grow(seed=seed, limit=8, policy=policy, tds=tds)
    key_of = {phi: key for key, phi in policy.phis.items()}
    by_id = {node.id: node.turn.generation.signals for node in group.nodes}
    again = 0
    for node in group.nodes:
        kept = key_of[by_id[node.id].phi].split(".")
        first, tries = ".".join(kept[:3]), int(kept[3]) if len(kept) > 3 else 0
        again += tries
        if node.parent is None:
            assert tries == 0
            continue
        gammas = [abs(policy.phis[f"{first}.{n}" if n else first] - by_id[node.parent].phi) for n in range(tries + 1)]
        assert all(gamma < 0.01 for gamma in gammas[:-1])
        assert gammas[-1] >= 0.01 or tries == 2
    assert group.counters["resamples"] == group.counters["tokens_discarded"] == again > 0
    assert policy.calls == len(group.nodes) + again


def test_without_tds_every_turn_is_sampled_once() -> None:
    policy = Wavering(0)
    group, _ = grow(limit=8, policy=policy)
    assert policy.calls == len(group.nodes)


@pytest.mark.parametrize("seed", range(4))
def test_a_turn_without_an_action_ends_its_episode_where_that_is_asked_for(seed: int) -> None:
    group, _ = grow(seed=seed, limit=6, policy=Mumbling(0.5, seed), void_ends=True)
    paths = [group.path(leaf) for leaf in group.leaves]
    voids = [[node.turn.parsed.void for node in path] for path in paths]
    assert not any(any(path[:-1]) for path in voids)
    assert [leaf.success for leaf in group.leaves] == [not path[-1] for path in voids]
    assert any(path[-1] for path in voids)


def test_a_turn_without_an_action_goes_on_otherwise() -> None:
    group, _ = grow(limit=6, policy=Mumbling(0.5))
    assert any(node.turn.parsed.void for node in group.nodes)
    assert all(leaf.success or group.path(leaf)[-1].depth + 1 == 20 for leaf in group.leaves)
