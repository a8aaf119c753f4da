"""What the driver knows of a run, as one value: the loop works on it, a checkpoint holds it.

Invariant: a task taken from the sampler is in exactly one place: waiting to be admitted again, running, ready, in the
batch that is being trained, or in the ledger. Every move between them is a method of :class:`RunState`; the places that
count towards the lag bound are left only when a version is published, or a task is lost or given up.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from asyncrl.algo.staleness import split_lags
from asyncrl.rollout.coordinators import Expanded
from asyncrl.rollout.summary import GroupSummary, Tally
from asyncrl.runtime.ledger import TRAINED, Entry, Ledger
from asyncrl.types import Task

Trained = tuple[GroupSummary, int]
"""A group of a training batch, and the learner's version when it completed."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A task that has been admitted."""

    position: int
    """The task's number in the sampler's order."""
    task: Task
    key: int
    """Admission number, unique in a run."""
    admitted_at: int
    """The learner's version then."""
    number: int = 1
    """Which attempt at the task this is."""

    def entry(self, outcome: str, version: int, seconds: float, **more: Any) -> Entry:
        """The ledger's line for the end of this attempt."""
        task = self.task
        return Entry(self.position, task.env, task.id, task.seed, self.key, outcome, version, seconds, **more)


@dataclass(frozen=True, slots=True)
class Ready:
    """A completed group that waits to be trained."""

    attempt: Attempt
    done: int
    """The learner's version when the group was complete."""
    group: Annotated[Expanded, Field(exclude=True)]
    """Its bulk is saved apart."""


@dataclass
class Totals(Tally):
    """What a run came to: the groups it trained, and what it lost."""

    lost: int = 0
    """Attempts lost to infrastructure; ``counters`` holds theirs too."""
    logprob_gap_max: float = 0.0
    lags: Counter[int] = field(default_factory=Counter)
    """Turn samples by lag in versions."""

    def train(self, groups: Iterable[Trained], version: int, learned: Mapping[str, float]) -> None:
        """Count a batch trained at ``version``, with the learner's figures of it."""
        for summary, done in groups:
            self.add(summary)
            for lag, turns in split_lags(summary.spans, done, version).items():
                self.lags[lag.total] += turns
        self.counters.update({name: int(learned[name]) for name in ("digests_checked", "digest_mismatches")})

    def summary(self) -> dict[str, Any]:
        """Under the names of the run's summary."""
        names = "branches_verified", "replayed_steps", "replay_mismatches", "digests_checked", "digest_mismatches"
        generated = self.tokens + self.counters["tokens_discarded"]
        return {name: self.counters[name] for name in names} | {
            "groups": self.groups,
            "groups_lost": self.lost,
            "turn_samples": self.turns,
            "tokens_generated": generated,
            "tokens_kept": self.tokens,
            "tokens_per_success": generated / self.successes if self.successes else None,
            "turns_cut": self.counters["cut_stable"] + self.counters["cut_cap"],
            "resamples": self.counters["resamples"],
            "lag_mean": sum(lag * turns for lag, turns in self.lags.items()) / max(1, self.turns),
            "lag_max": max(self.lags, default=0),
            "leaves_max": self.leaves_max,
            "branched_turn_share": self.branched,
            "branch_restore_ms_mean": self.counters["branch_restore_ms"] / max(1, self.counters["branches_verified"]),
            "publish_logprob_gap_max": self.logprob_gap_max,
        }


@dataclass(slots=True)
class RunState:
    version: int = 0
    update: int = 0
    updates_at: dict[int, int] = field(default_factory=lambda: {0: 0})
    """Updates made when a version was published."""
    next_key: int = 0
    next_position: int = 0
    again: deque[tuple[int, int]] = field(default_factory=deque)
    """(position, number of the next attempt) of tasks to admit before new ones."""
    running: dict[int, Attempt] = field(default_factory=dict)
    ready: dict[int, Ready] = field(default_factory=dict)
    training: list[Ready] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)
    totals: Totals = field(default_factory=Totals)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Where the driver's time went: wait, update, publish, ..., and admission_blocked beside them."""

    @property
    def outstanding(self) -> int:
        """Groups that count towards the lag bound."""
        return len(self.running) + len(self.ready) + len(self.training)

    def admit(self, task_at: Callable[[int], Task]) -> Attempt:
        """Begin an attempt: at a task that was lost before, or else at the next new one."""
        position, number = self.again.popleft() if self.again else (self.next_position, 1)
        self.next_position = max(self.next_position, position + 1)
        attempt = Attempt(position, task_at(position), self.next_key, self.version, number)
        self.next_key += 1
        self.running[attempt.key] = attempt
        return attempt

    def complete(self, key: int, group: Expanded) -> None:
        self.ready[key] = Ready(self.running.pop(key), self.version, group)

    def admit_again(self, key: int) -> None:
        """Let a lost attempt be followed by another."""
        attempt = self.running.pop(key)
        self.again.append((attempt.position, attempt.number + 1))

    def give_up(self, key: int, outcome: str, cause: str, seconds: float) -> None:
        self.ledger.add(self.running.pop(key).entry(outcome, self.version, seconds, cause=cause))

    def take(self, keys: Iterable[int]) -> None:
        """Make a batch of ready groups, in this order."""
        self.training = [self.ready.pop(key) for key in keys]

    def publish(self, learned: Mapping[str, float]) -> None:
        """The batch was trained, with the learner's figures of it, and the weights of it are the next version."""
        self.totals.train([(ready.group.summary, ready.done) for ready in self.training], self.version, learned)
        self.update += int(learned["updates"])
        for ready in self.training:
            one = ready.group.summary
            facts = {"solved": one.successes > 0, "update": self.update, "rows": one.turns, "digest": one.digest}
            self.ledger.add(ready.attempt.entry(TRAINED, self.version, one.seconds, **facts))
        self.training = []
        self.version += 1
        self.updates_at[self.version] = self.update

    def to_json(self) -> dict[str, Any]:
        """Everything but the ready groups' bulk."""
        return STATE.dump_python(self, mode="json")

    @classmethod
    def from_json(cls, facts: Mapping[str, Any], groups: Mapping[int, Expanded]) -> "RunState":
        """The inverse of :meth:`to_json`, given the ready groups by key; growing forests are tasks to admit again."""
        ready = {int(key): one | {"group": groups[int(key)]} for key, one in facts["ready"].items()}
        state = STATE.validate_python({**facts, "ready": ready})
        unfinished = [(attempt.position, attempt.number) for attempt in state.running.values()]
        state.again, state.running = deque(sorted([*state.again, *unfinished])), {}
        return state


STATE = TypeAdapter(RunState)
