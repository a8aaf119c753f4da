"""Growing one task's forest.

Invariants: every leaf is one coroutine, so no turn waits for a turn of another leaf; the forest has one owner, so its
leaf budget is a local integer; a branch happens after the exploring turn's action has been executed, and the child
starts from exactly the state the parent was in then (copied, or replayed and verified); a child that cannot be
verified is released, counted, and never trained on; an infrastructure failure loses a leaf, it never scores it; a leaf
pays (:data:`REBUILDS`) for the environments it lost itself, not for those a neighbour's failure took; whatever ends a
leaf, cancellation included, gives its slot back.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from asyncrl.config.run import RunConfig
from asyncrl.config.thinking import ThinkingConfig
from asyncrl.engine.fleet import Fleet, GenerationFailed
from asyncrl.engine.waits import now
from asyncrl.env import ReplayMismatch, Trace
from asyncrl.rollout.slot import Slot, SlotLost
from asyncrl.text.parse import parse
from asyncrl.text.prompt import PromptEncoder, PromptTooLong
from asyncrl.tree.criteria import Criterion
from asyncrl.tree.forest import Forest, LeafId, LeafState
from asyncrl.types import Generation, Group, Moves, Node, Observation, Sampling, Step, Turn

log = logging.getLogger(__name__)

REBUILDS = 3
"""How often one leaf's environment is rebuilt elsewhere before the leaf counts as lost."""

CAUSES: dict[type[Exception], str] = {
    SlotLost: "env_worker",
    GenerationFailed: "generator",
    PromptTooLong: "prompt_too_long",
}
"""What may end a leaf without a score, and the name it is counted under."""


@dataclass(frozen=True, slots=True)
class Site:
    """What an expansion works with; shared by all expansions of a coordinator."""

    config: RunConfig
    fleet: Fleet
    acquire: Callable[[], Awaitable[Slot]]
    """Waits for a free environment slot."""
    prompts: PromptEncoder
    copies_itself: bool
    """The environment can snapshot and restore its state."""
    max_turns: int
    moves: Moves = "action"


@dataclass(slots=True)
class _Fork:
    """The state a child starts from."""

    trace: Trace
    snapshot: Any
    actions: tuple[str, ...] | None


@dataclass(slots=True)
class _Walk:
    """One leaf on its way: where its environment lives and what it has done."""

    leaf: LeafId
    slot: Slot
    trace: Trace


@dataclass(eq=False)
class Expansion:
    site: Site
    forest: Forest
    """A new one; its counters take what happens here too."""
    criterion: Criterion
    sampling: Sampling
    tds: ThinkingConfig | None = None
    """Sample turns again that repeat the last one, by these settings."""
    void_ends: bool = False
    """A turn without any action ends its episode."""

    def __post_init__(self) -> None:
        self._task, self._counters = self.forest.task, self.forest.counters
        self._counters["lost_prompt_too_long"] = 0  # a figure of every batch
        self._lost_slots: Counter[LeafId] = Counter()
        self._triggers: list[tuple[int, asyncio.Future[tuple[LeafId, ...]]]] = []
        self.last_loss = "", ""
        """Cause, by its name in :data:`CAUSES`, and sentence of the last leaf that was lost."""

    async def grow(self) -> Group:
        """Expand until every leaf has ended. The group may hold fewer leaves than were started, or none."""
        started = now()
        async with asyncio.TaskGroup() as self._walks:
            for leaf in self.forest.live():
                self._walks.create_task(self._root(leaf))
        return self.forest.group(now() - started)

    async def _root(self, leaf: LeafId) -> None:
        try:
            slot, first = await self._place(leaf, lambda slot: slot.reset(self._task))
        except SlotLost as lost:
            self._lose(leaf, lost)
            return
        await self._walk(_Walk(leaf, slot, Trace(self._task, first)))

    async def _child(self, leaf: LeafId, fork: _Fork) -> None:
        """Wait for a slot as an action list, become the parent's state, prove it, go on alone."""
        asked = now()

        async def become(slot: Slot) -> Observation:
            began = now()
            first = await self._reproduce(slot, fork)
            self._counters["branch_wait_ms"] += round(1e3 * (began - asked))
            self._counters["branch_restore_ms"] += round(1e3 * (now() - began))
            return first

        try:
            slot, first = await self._place(leaf, become)
        except (ReplayMismatch, SlotLost) as error:
            log.warning("a branch of %s/%s is dropped: %s", self._task.env, self._task.id, error)
            unverified = isinstance(error, ReplayMismatch)
            self._counters["replay_mismatches"] += unverified
            self.forest.release(leaf, "replay_mismatch" if unverified else CAUSES[SlotLost])
            return
        self._counters["branches_verified"] += 1
        trace = fork.trace.copy()
        # The child's first turn records what the child saw, so that the tree's record can be checked for it.
        trace.steps[-1] = trace.steps[-1]._replace(observation=first)
        await self._walk(_Walk(leaf, slot, trace))

    async def _reproduce(self, slot: Slot, fork: _Fork) -> Observation:
        """Copy or replay the state of a fork; raises ReplayMismatch where it is not reached."""
        if not self.site.copies_itself:
            first = await slot.replay(fork.trace, fork.actions)
            self._counters["replayed_steps"] += len(fork.trace.actions)
            return first
        first, expected = await slot.restore(fork.snapshot), fork.trace.last
        if not first.same_as(expected):
            raise ReplayMismatch(self._task, len(fork.trace.actions), "restored state", expected.text, first.text)
        return first

    async def _place(self, leaf: LeafId, begin: Callable[[Slot], Awaitable[Observation]]) -> tuple[Slot, Observation]:
        """A slot in the state that ``begin`` gives it, on another slot when the environment is lost on the way."""
        while True:
            slot = await self.site.acquire()
            try:
                return slot, await begin(slot)
            except SlotLost as lost:
                self._charge(leaf, lost)
            except BaseException:  # cancelled, or not verified
                slot.release()
                raise

    def _charge(self, leaf: LeafId, lost: SlotLost) -> None:
        """Allow a leaf to go on after a lost environment; raises SlotLost when it lost too many itself."""
        self._lost_slots[leaf] += lost.own
        if self._lost_slots[leaf] > REBUILDS:
            raise SlotLost(f"the environment was lost {self._lost_slots[leaf]} times, at last: {lost}") from lost
        log.warning("%s/%s: %s; rebuilding the episode", self._task.env, self._task.id, lost)

    async def _walk(self, walk: _Walk) -> None:
        """Turn after turn until the episode ends."""
        try:
            while not await self._turn(walk):
                pass
        except tuple(CAUSES) as error:
            self._lose(walk.leaf, error)
        finally:
            walk.slot.release()

    async def _turn(self, walk: _Walk) -> bool:
        """One turn; True when it was the leaf's last."""
        forest, leaf = self.forest, walk.leaf
        path = forest.path(leaf)
        observation = walk.trace.last
        try:
            past = [(node.turn.observation, node.turn.parsed.action) for node in path]
            prompt_ids = self.site.prompts.encode(observation, past)
        except PromptTooLong:
            self._counters["prompt_too_long"] += 1
            if forest.state(leaf) is not LeafState.ACTIVE or not path:
                raise
            forest.finish(leaf, success=False)
            return True
        generation = await self._sample(prompt_ids, f"{self.forest.key}.{leaf}.{len(path)}", path)
        text = self.site.prompts.decode(generation.token_ids)
        parsed = parse(text, self.site.config.prompt.method, self.site.moves)
        step = await self._step(walk, parsed.action)
        walk.trace.add(parsed.action, step)
        turn = Turn(
            observation=observation,
            prompt_ids=tuple(prompt_ids),
            generation=generation,
            text=text,
            parsed=parsed,
            reward=step.reward,
            terminated=step.terminated,
            truncated=step.truncated,
        )
        node = forest.extend(leaf, turn)
        if step.done:
            forest.finish(leaf, bool(step.info.get("success")))
            return True
        if node.depth + 1 >= self.site.max_turns or (parsed.void and self.void_ends):
            forest.finish(leaf, success=False)
            return True
        if self.criterion(turn):
            await self._branch(walk)
        return False

    async def _sample(self, prompt_ids: Sequence[int], name: str, path: Sequence[Node]) -> Generation:
        """The turn's response; under TDS it is sampled again while Gamma says that it repeats the last turn (T2PO)."""
        generate = partial(self.site.fleet.generate, prompt_ids, self.sampling, near=str(self.forest.key))
        generation = await generate(key=name)
        before = path[-1].turn.generation.signals if path else None
        if self.tds is None or before is None:
            return generation
        for attempt in range(1, self.tds.max_resamples + 1):
            if generation.signals is None or generation.signals.gamma(before) >= self.tds.eta:
                break
            try:
                again = await generate(key=f"{name}.{attempt}")
            except GenerationFailed as error:
                log.warning("turn %s is not sampled again: %s", name, error)
                break
            self._counters["resamples"] += 1
            self._counters["tokens_discarded"] += len(generation.token_ids)
            generation = again
        return generation

    async def _branch(self, walk: _Walk) -> None:
        """Ask for children at the state the leaf is in now, and start those that are granted."""
        granted: asyncio.Future[tuple[LeafId, ...]] = asyncio.get_running_loop().create_future()
        self._triggers.append((walk.leaf, granted))
        if len(self._triggers) == 1:  # triggers of one pass of the event loop are simultaneous: served together
            asyncio.get_running_loop().call_soon(self._serve_triggers)
        children = await granted
        if not children:
            return
        try:
            snapshot = await walk.slot.snapshot() if self.site.copies_itself else None
            actions = None if self.site.copies_itself else await walk.slot.list_actions()
        except SlotLost as lost:
            for child in children:
                self.forest.release(child, CAUSES[SlotLost])
            await self._rebuild(walk, lost)
            return
        fork = _Fork(walk.trace.copy(), snapshot, actions)
        for child in children:
            self._walks.create_task(self._child(child, fork))

    def _serve_triggers(self) -> None:
        triggers, self._triggers = self._triggers, []
        waiting = [(leaf, granted) for leaf, granted in triggers if not granted.done()]
        children = self.forest.serve([leaf for leaf, _ in waiting])
        for leaf, granted in waiting:
            granted.set_result(children.get(leaf, ()))

    async def _step(self, walk: _Walk, action: str) -> Step:
        """Execute an action, rebuilding the environment elsewhere when its worker is lost on the way."""
        while True:
            try:
                return await walk.slot.step(action)
            except SlotLost as lost:
                await self._rebuild(walk, lost)

    async def _rebuild(self, walk: _Walk, lost: SlotLost) -> None:
        """Bring the leaf's environment back on another slot by verified replay."""
        self._charge(walk.leaf, lost)
        try:
            walk.slot, _ = await self._place(walk.leaf, lambda slot: slot.replay(walk.trace, None))
        except ReplayMismatch as mismatch:
            self._counters["replay_mismatches"] += 1
            raise SlotLost(str(mismatch)) from mismatch
        self._counters["rebuilds"] += 1

    def _lose(self, leaf: LeafId, error: Exception) -> None:
        """End a leaf without a score; a child before its first turn gives its place in the budget back."""
        log.warning("a leaf of %s/%s is lost: %s", self._task.env, self._task.id, error)
        self.last_loss = CAUSES[type(error)], str(error)
        self.forest.lose(leaf, CAUSES[type(error)])
