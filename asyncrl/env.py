"""The environment protocol, its registry, and verified branching.

Invariants:

* ``reset(task)`` gives the same initial state for the same task, in every process.
* An environment that sets ``can_snapshot`` copies itself: ``restore(snapshot())`` in any process gives exactly the
  state the snapshot was taken in. Every other environment is branched by replaying its action list, and each replayed
  step must give the recorded observation, reward and end flags; at the fork the admissible actions must agree too,
  where they can be listed. A branch that fails this is refused with :class:`ReplayMismatch`; it is never trusted.
* Environments know nothing of Ray, vLLM or training.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from asyncrl.types import Moves, Observation, Step, Task


class Env(ABC):
    """One environment slot. An author subclasses this; ``asyncrl env check module:Class`` verifies the result."""

    role: ClassVar[str]
    """One sentence that tells the agent what it is and where; the head of every prompt."""
    max_turns: ClassVar[int]
    """Turns after which the environment itself ends an episode (``truncated``)."""
    can_snapshot: ClassVar[bool] = False
    moves: ClassVar[Moves] = "action"
    """How the agent writes what it does."""
    image_shape: tuple[int, int, int] | None = None
    """(height, width, 3) of the image in every observation, or None where there is none."""

    @classmethod
    @abstractmethod
    def tasks(cls, split: str) -> Sequence[str]:
        """Task ids of a split (``"train"``, ``"test"`` or the environment's own names), in a fixed order.

        Raises ValueError: unknown split; the message lists the known ones.
        """

    @classmethod  # noqa: B027 - most environments need nothing
    def preflight(cls) -> None:
        """Raises ValueError: this machine lacks something that the environment needs, e.g. Java, data or a server."""

    def check_splits(self, *splits: str) -> None:  # noqa: B027 - most have no data apart
        """Raises ValueError: the data of one is not there. Reads none."""

    @abstractmethod
    def reset(self, task: Task) -> Observation:
        """Begin ``task``; may be called at any time."""

    @abstractmethod
    def step(self, action: str) -> Step:
        """Execute one action. A malformed action is answered in the observation, never raised."""

    def list_actions(self) -> tuple[str, ...] | None:
        """Admissible actions now; for environments whose list is too dear to put into every observation."""
        return None

    def expert(self, task: Task) -> list[str] | None:
        """A successful action list for ``task`` (the environment is left reset), or None where there is no expert."""
        return None

    def expert_action(self) -> str | None:
        """What the expert would do in the current state, or None where it only knows whole episodes."""
        return None

    def snapshot(self) -> Any:
        """A picklable value of the whole state. Only where ``can_snapshot``."""
        raise TypeError(f"{type(self).__name__} cannot copy itself; branch it by replay (can_snapshot is False)")

    def restore(self, snapshot: Any) -> Observation:
        """Return to a snapshot; gives the observation of that state. Only where ``can_snapshot``."""
        raise TypeError(f"{type(self).__name__} cannot copy itself; branch it by replay (can_snapshot is False)")

    def close(self) -> None:  # noqa: B027 - most environments hold nothing
        """Release processes, sockets and files; idempotent."""


class ReplayMismatch(RuntimeError):
    """A replayed step did not reproduce what was recorded."""

    def __init__(self, task: Task, step: int, what: str, expected: object, got: object) -> None:
        super().__init__(task, step, what, str(expected)[:200], str(got)[:200])  # what it is made of: so it pickles
        self.step, self.what = step, what

    def __str__(self) -> str:
        task, step, what, expected, got = self.args
        return (
            f"replay of {task.env} task {task.id} diverged at step {step} in {what}: expected {expected!r}, got {got!r}"
        )


@dataclass(slots=True)
class Trace:
    """What an episode did and saw: enough to rebuild it elsewhere and to prove that it was rebuilt."""

    task: Task
    first: Observation
    actions: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def add(self, action: str, step: Step) -> None:
        self.actions.append(action)
        self.steps.append(step)

    def copy(self) -> Self:
        return replace(self, actions=list(self.actions), steps=list(self.steps))

    @property
    def last(self) -> Observation:
        return self.steps[-1].observation if self.steps else self.first


def replay(env: Env, trace: Trace, actions_at_fork: tuple[str, ...] | None = None) -> Observation:
    """Reset ``env`` to the trace's task, execute its actions, and verify every step.

    ``actions_at_fork``: what the parent's ``list_actions()`` gave at the fork, or None where it cannot list them.

    Raises ReplayMismatch: an observation, a reward, an end flag, or the admissible actions at the fork differ.
    """
    task, observation = trace.task, env.reset(trace.task)
    if not observation.same_as(trace.first):
        raise ReplayMismatch(task, 0, "observation", trace.first.text, observation.text)
    for i, (action, recorded) in enumerate(zip(trace.actions, trace.steps, strict=True), start=1):
        got = env.step(action)
        if not got.observation.same_as(recorded.observation):
            raise ReplayMismatch(task, i, "observation", recorded.observation.text, got.observation.text)
        if got.reward != recorded.reward:
            raise ReplayMismatch(task, i, "reward", recorded.reward, got.reward)
        if (got.terminated, got.truncated) != (recorded.terminated, recorded.truncated):
            raise ReplayMismatch(task, i, "end flags", recorded[2:4], got[2:4])
        observation = got.observation
    if actions_at_fork is not None and (listed := env.list_actions()) != actions_at_fork:
        raise ReplayMismatch(task, len(trace.actions), "admissible actions", actions_at_fork, listed)
    return observation


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """How to make an environment: plain data, so that it travels to any worker."""

    name: str
    target: str
    """``module:Class``."""
    options: Mapping[str, Any] = field(default_factory=dict)

    def env_class(self) -> type[Env]:
        module, _, attribute = self.target.partition(":")
        try:
            found = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"environment {self.name!r}: cannot load {self.target!r}: {error}") from error
        if not (isinstance(found, type) and issubclass(found, Env)):
            raise ValueError(f"environment {self.name!r}: {self.target!r} is not a subclass of asyncrl.env.Env")
        return found

    def make(self) -> Env:
        return self.env_class()(**self.options)


REGISTRY: dict[str, str] = {
    "alfworld": "envs.alfworld.env:ALFWorld",
    "ezpoints": "envs.ezpoints:EZPoints",
    "pantry": "envs.pantry:Pantry",
    "scienceworld": "envs.scienceworld:ScienceWorld",
    "searchqa": "envs.searchqa.env:SearchQA",
    "sokoban": "envs.sokoban:Sokoban",
    "textworld": "envs.textworld.env:TextWorld",
    "webshop": "envs.webshop.env:WebShop",
}
"""Short name -> ``module:Class``."""


def find_env(name: str, options: Mapping[str, Any] | None = None) -> EnvSpec:
    """The spec of a registered short name, or of ``module:Class`` itself.

    Raises ValueError: neither registered nor of the form ``module:Class``.
    """
    target = name if ":" in name else REGISTRY.get(name)
    if target is None:
        raise ValueError(
            f"environment {name!r} is not registered; known: {', '.join(sorted(REGISTRY))}, or give 'module:Class'"
        )
    return EnvSpec(name, target, dict(options or {}))
