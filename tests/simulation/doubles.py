"""What stands in for models, environments and training: the parts that no promise of the loop is about.

Invariants: an episode is a function of its task and actions; a response says which generation it is, and the journal
knows of every generation which weights made each of its tokens, whatever version they were labelled with; a rank's
memory of what it trained is part of its state, so a checkpoint takes it along and a resumed rank forgets the rest.
"""

import asyncio
import json
import random
import zlib
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from asyncrl.algo.paths import Credit, Paths
from asyncrl.config.algo import AlgoConfig
from asyncrl.config.tree import TreeConfig
from asyncrl.env import Env
from asyncrl.learner.packing import split_groups
from asyncrl.learner.report import RankReport
from asyncrl.rollout.coordinator import Coordinator
from asyncrl.tree.forest import Forest
from asyncrl.types import Generation, Observation, Sampling, Step, Task, TurnSample, VersionSpan, token_digest
from tests.scripted_engine import ScriptedEngine
from tests.simulation.chance import Schedule

END = 2
HEAD, SERIAL = 10, 1000
"""The first id of a response says what it does, the second which generation it is."""


@dataclass(slots=True)
class Made:
    """One generation: the spans that were reported, and the weights that made each token."""

    spans: tuple[VersionSpan, ...]
    weights: tuple[int | None, ...]


@dataclass(slots=True)
class Row:
    """One turn sample as a rank trained it."""

    group: int
    node: int
    version: int
    """The generators' version then."""
    spans: tuple[VersionSpan, ...]
    serial: int
    tokens: int


@dataclass(slots=True)
class Journal:
    """What really happened, seen from where it happens."""

    schedule: Schedule
    rng: random.Random
    violations: list[str] = field(default_factory=list)
    made: list[Made] = field(default_factory=list)
    version: int = 0
    """Last label that a generator of this life was given."""
    weights: int = 0
    """Batches that the weights of the learner's rank 0 have seen."""
    weights_of: dict[int, int] = field(default_factory=lambda: {0: 0})
    """Weights that each version stands for."""
    expanded: dict[int, str] = field(default_factory=dict)
    """Task id by admission key."""
    groups: dict[int, tuple[int, frozenset[int]]] = field(default_factory=dict)
    """Completed groups by key: leaves and nodes."""
    rows: list[Row] = field(default_factory=list)
    """What the weights of rank 0 were trained on."""
    snapshots: list[tuple[int, int, list[Row]]] = field(default_factory=list)
    failed: set[int] = field(default_factory=set)
    """Weights whose transfer has failed somewhere."""
    living: Callable[[], int] = lambda: 1
    """Counts the generators that live."""
    batches: int = 0
    """Trained in all lives."""
    awaited: list[tuple[int, asyncio.Future[None]]] = field(default_factory=list)

    def violation(self, text: str) -> None:
        self.violations.append(text)

    def label(self, version: int) -> None:
        self.version = version
        self.weights_of[version] = self.weights

    def perhaps_fail(self) -> None:
        """A generator's part in a transfer may fail, once for the same weights and while another lives."""
        if self.rng.random() < self.schedule.transfer_fails and self.weights not in self.failed and self.living() > 1:
            self.failed.add(self.weights)
            raise RuntimeError("the simulated transfer failed")

    def count_batch(self) -> None:
        self.batches += 1
        for batches, reached in self.awaited:
            if batches <= self.batches and not reached.done():
                reached.set_result(None)

    async def until(self, batches: int) -> None:
        """Wait until so many batches have been trained."""
        reached = asyncio.get_running_loop().create_future()
        self.awaited.append((batches, reached))
        if batches > self.batches:
            await reached


JOURNAL: ContextVar[Journal] = ContextVar("journal")


# -- environment and policy -------------------------------------------------------------------------------------


class Replaying(Env):
    """The state is the list of actions; it is the observation too."""

    role: ClassVar[str] = "You walk."
    max_turns: ClassVar[int] = 6

    @classmethod
    def tasks(cls, split: str) -> Sequence[str]:
        return [str(i) for i in range(200)] if split == "train" else ["-1", "-2"]

    def reset(self, task: Task) -> Observation:
        self._task, self._done = task, ""
        return self._seen()

    def step(self, action: str) -> Step:
        self._done += action or "-"
        over = len(self._done) >= length(self._task)
        success = over and self._done.count("a") % 2 == 0
        return Step(self._seen(), float(success), over, False, {"success": success} if over else {})

    def _seen(self) -> Observation:
        return Observation(state(self._task.id, self._done), "endless" if self._is_endless() else "walk")

    def _is_endless(self) -> bool:
        return self._task.id in JOURNAL.get().schedule.endless


class Copying(Replaying):
    can_snapshot: ClassVar[bool] = True

    def snapshot(self) -> tuple[Task, str]:
        return self._task, self._done

    def restore(self, snapshot: tuple[Task, str]) -> Observation:
        self._task, self._done = snapshot
        return self._seen()


def length(task: Task) -> int:
    """Turns of an episode: 1 to 6, short ones more often."""
    draw = zlib.crc32(f"{task.id}/{task.seed}".encode())
    return 1 + (draw % 7) * (draw // 7 % 7) // 8


def state(task: str, done: str) -> str:
    return f"{task}:{done}"


class Tokenizer:
    eos_token_id = END

    def apply_chat_template(self, conversation: list[dict[str, str]], **_: Any) -> list[int]:
        text = conversation[0]["content"]
        return [3] * 100 if text.startswith("endless") else [3 + len(text)]

    def encode(self, text: str, **_: Any) -> list[int]:
        return [3] * len(text)

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        way, tag = divmod(token_ids[0] - HEAD, 3)
        reason = ("<think>so</think>", "<explore>or</explore>", "")[tag]
        return f"{reason}<action>{'ab'[way]}</action>"

    def get_added_vocab(self) -> dict[str, int]:
        return {}


def script(prompt_ids: Sequence[int], sampling: Sampling, key: str, version: int, source: random.Random) -> list[int]:
    """A response: what it does, which generation it is, some tokens more, the end."""
    journal, draw = JOURNAL.get(), source.random()
    schedule = journal.schedule
    tag = 1 if draw < schedule.explore else 2 if draw > 1 - schedule.invalid else 0
    journal.made.append(Made((), ()))
    serial = SERIAL + len(journal.made) - 1
    return [HEAD + 3 * source.randrange(2) + tag, serial, *[5] * source.randrange(4), END]


# -- generator --------------------------------------------------------------------------------------------------


class Engine(ScriptedEngine):
    """A scripted engine that sleeps once a turn instead of once a token; tokens come evenly, and none in a pause."""

    def __init__(self, *_: Any) -> None:
        super().__init__(script)
        self._journal = JOURNAL.get()
        self._weights: int | None = 0
        """None while a transfer has overwritten part of them."""
        self._arriving = 0
        self._phases: list[tuple[int, int | None]] = [(0, 0)]
        """Version and weights before the first pause and after each."""
        self._pauses: list[float] = []
        """When each began."""

    async def _generate(self, prompt_ids: Sequence[int], sampling: Sampling, key: str) -> Generation:
        journal, now = self._journal, asyncio.get_running_loop().time
        await self._gate.passed()
        tokens = tuple(self._script(prompt_ids, sampling, key, self._gate.version, journal.rng))
        pace = journal.schedule.generation.draw(journal.rng) / len(tokens)
        made: list[tuple[int, int | None]] = []
        while len(made) < len(tokens):
            await self._gate.passed()
            began, pauses, left = now(), len(self._pauses), len(tokens) - len(made)
            await asyncio.sleep(pace * left)
            done = left if len(self._pauses) == pauses else min(left, int((self._pauses[pauses] - began) / pace))
            made += [self._phases[pauses]] * done
        spans: list[VersionSpan] = []
        for i, (version, _) in enumerate(made):
            if spans and spans[-1].version == version:
                spans[-1] = spans[-1]._replace(end=i + 1)
            else:
                spans.append(VersionSpan(version, i, i + 1))
        journal.made[tokens[1] - SERIAL] = Made(tuple(spans), tuple(weights for _, weights in made))
        return Generation(tokens, (-1.0,) * len(tokens), tuple(spans), "stop", token_digest(tokens))

    async def score(self, ids: Sequence[int], start: int) -> list[float]:
        self._gate.check()
        return [likelihood(self._weights or 0)] * (len(ids) - start)

    async def pause(self) -> None:
        if len(self._pauses) < len(self._phases):  # not paused already
            self._pauses.append(asyncio.get_running_loop().time())
        await super().pause()

    async def resume(self, version: str) -> None:
        if len(self._pauses) == len(self._phases):
            self._phases.append((self._gate.version, self._weights))
        await super().resume(version)

    async def start_weight_update(self, round: int) -> None:
        await super().start_weight_update(round)
        if self._journal.schedule.in_place:
            self._weights = None

    async def update_weights(self, round: int, request: dict[str, Any]) -> None:
        await super().update_weights(round, request)
        self._journal.perhaps_fail()
        self._arriving = request["weights"]

    async def finish_weight_update(self, round: int) -> None:
        await super().finish_weight_update(round)
        self._weights = self._arriving

    async def update_weight_version(self, version: str) -> None:
        await super().update_weight_version(version)
        self._journal.label(int(version))
        if len(self._pauses) < len(self._phases):
            self._phases[-1] = (self._gate.version, self._weights)


def likelihood(weights: int) -> float:
    """Log-prob of any token."""
    return -1.0 - 0.1 * weights


# -- learner ----------------------------------------------------------------------------------------------------


class Rank:
    """A learner rank without a model: it remembers what it was given."""

    def __init__(self, rank: int, *_: Any) -> None:
        self._rank = rank
        self._journal = JOURNAL.get()
        self._updates = self._weights = self._round = 0
        self._generators: list[Any] = []
        self._met: list[int] = []
        """Generators of the last transfer, which was well."""
        self._note([])

    def _note(self, rows: list[Row]) -> None:
        if self._rank == 0:
            self._journal.rows, self._journal.weights = rows, self._weights

    def listen(self) -> tuple[str, int]:
        return "simulation", 0

    async def start(self, host: str, port: int) -> None:
        await self._work()

    async def update(self, batch: Sequence[Any]) -> RankReport:
        groups: list[list[TurnSample]] = [await reference for reference in batch]
        journal = self._journal
        version = journal.version
        await self._work()
        steps = len(split_groups(len(groups), journal.schedule.config.learner.updates_per_batch))
        self._updates, self._weights = self._updates + steps, self._weights + 1
        rows = [
            Row(s.group, s.node, version, s.spans, s.response_ids[1] - SERIAL, len(s.response_ids))
            for group in groups
            for s in group
        ]
        if self._rank == 0:
            self._note([*journal.rows, *rows])
            journal.count_batch()
        return RankReport(weight=1.0, sums={"loss": 0.0}, rows=len(rows), updates=steps)

    async def logprobs(self, sequences: Sequence[tuple[Sequence[int], int]], temperature: float = 1.0) -> Any:
        return {i: [likelihood(self._weights)] * (len(ids) - start) for i, (ids, start) in enumerate(sequences)}

    async def connect(self, generators: Sequence[Any], timeout_s: float) -> None:
        self._generators = list(generators)

    async def send_weights(self, members: Sequence[int]) -> dict[int, str]:
        """As the real one: who fails leaves the round, the others get all weights."""
        failed: dict[int, str] = {}
        if self._rank == 0:
            if self._met != list(members):
                await self._everywhere(members, failed, "init_weight_transfer_engine", {})
            self._round += 1
            await self._everywhere(members, failed, "start_weight_update", self._round)
            await asyncio.sleep(self._journal.schedule.transfer.draw(self._journal.rng))
            await self._everywhere(members, failed, "update_weights", self._round, {"weights": self._weights})
            await self._everywhere(members, failed, "finish_weight_update", self._round)
            self._met = [] if failed else list(members)
        return failed

    async def _everywhere(self, members: Sequence[int], failed: dict[int, str], method: str, *args: Any) -> None:
        calls = {at: getattr(self._generators[at], method).remote(*args) for at in members if at not in failed}
        for at, call in calls.items():  # each answers or dies: no engine here is silent
            try:
                await call
            except Exception as error:
                failed[at] = f"{method}: {error}"

    async def save(self, path: str) -> None:
        journal = self._journal
        if self._rank:
            return
        rows, target = list(journal.rows), Path(path)
        target.mkdir(parents=True)  # its caller's to put in place, and new
        await self._work(0.1)
        journal.snapshots.append((self._updates, self._weights, rows))
        (target / "learner.json").write_text(json.dumps(len(journal.snapshots) - 1))
        await self._work(0.1)

    async def load_state(self, path: str) -> int:
        number = json.loads((Path(path) / "learner.json").read_text())
        self._updates, self._weights, rows = self._journal.snapshots[number]
        self._note(list(rows))
        return self._updates

    async def _work(self, share: float = 1.0) -> None:
        await asyncio.sleep(share * self._journal.schedule.training.draw(self._journal.rng))


def no_credit(paths: Paths, algo: AlgoConfig) -> Credit:
    """For advantages: numbers that no promise is about."""
    nothing = np.zeros(len(paths.parent))
    return Credit(nothing, nothing, np.bincount(paths.rows().turn))


# -- watched production classes ---------------------------------------------------------------------------------


class WatchedForest(Forest):
    """Counts leaves from what the forest grants, not from its own count."""

    def __init__(self, task: Task, key: int, cfg: TreeConfig, rng: random.Random) -> None:
        super().__init__(task, key, cfg, rng)
        self._held = set(range(cfg.roots))

    def serve(self, triggers: Sequence[int]) -> dict[int, tuple[int, ...]]:
        branches = super().serve(triggers)
        self._held.update(*branches.values())
        if len(self._held) > self.cfg.leaves:
            JOURNAL.get().violation(
                f"promise 1: group {self.key} holds {len(self._held)} leaves, at most {self.cfg.leaves} are allowed"
            )
        return branches

    def release(self, leaf_id: int, cause: str) -> None:
        super().release(leaf_id, cause)
        self._held.remove(leaf_id)


class WatchedCoordinator(Coordinator):
    async def expand(self, task: Task, key: int) -> Any:
        journal = JOURNAL.get()
        journal.expanded[key] = task.id  # a resumed run gives keys again
        journal.groups.pop(key, None)
        summary, samples, record = await super().expand(task, key)
        leaves = len(record["leaves"])
        journal.groups[key] = (leaves, frozenset(node["id"] for node in record["nodes"]))
        check_record(journal, record)
        return summary, samples, record


def check_record(journal: Journal, record: Any) -> None:
    """Promise 2: each turn saw exactly the state that the actions above it lead to."""
    states = {None: state(record["task"], "")}
    for node in record["nodes"]:
        if node["observation"] != states[node["parent"]]:
            journal.violation(
                f"promise 2: group {record['key']}, node {node['id']} saw {node['observation']!r}, "
                f"its path leads to {states[node['parent']]!r}"
            )
        states[node["id"]] = states[node["parent"]] + (node["action"] or "-")
