"""A sound little environment and its broken cousins, each with one fault for the conformance checker to find."""

import itertools
import random
from collections.abc import Sequence
from typing import Any, ClassVar

from asyncrl.env import Env
from asyncrl.types import Observation, Step, Task


class Sound(Env):
    """A corridor: ``right`` three more times than ``left`` wins."""

    role: ClassVar[str] = "You walk along a corridor."
    max_turns: ClassVar[int] = 8
    can_snapshot: ClassVar[bool] = True

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    @classmethod
    def tasks(cls, split: str) -> Sequence[str]:
        if split not in ("train", "test"):
            raise ValueError(f"no split {split!r}; known: train, test")
        return [f"{split}-{i}" for i in range(6)]

    def reset(self, task: Task) -> Observation:
        self.state = {"task": task.id, "at": 0, "turns": 0}
        return self.observe()

    def step(self, action: str) -> Step:
        self.state["turns"] += 1
        self.state["at"] += {"right": 1, "left": -1}.get(action, 0)
        success = self.state["at"] == 3
        over = not success and self.state["turns"] >= self.max_turns
        return Step(self.observe(), float(success), success, over, {"success": success})

    def observe(self) -> Observation:
        return Observation(f"You are at {self.state['at']}.", f"{self.state['task']}: reach 3", ("left", "right"))

    def list_actions(self) -> tuple[str, ...] | None:
        return ("left", "right")

    def expert(self, task: Task) -> list[str] | None:
        self.reset(task)
        return ["right"] * 3

    def snapshot(self) -> Any:
        return dict(self.state)

    def restore(self, snapshot: Any) -> Observation:
        self.state = dict(snapshot)
        return self.observe()


class Replayed(Sound):
    """Sound, but branched by replay."""

    can_snapshot: ClassVar[bool] = False


class Random(Replayed):
    """Draws from the global generator, which no one seeds."""

    def step(self, action: str) -> Step:
        step = super().step(action)
        noisy = Observation(f"{step.observation.text} {random.random()}", step.observation.goal, ("left", "right"))
        return step._replace(observation=noisy)


class RandomReward(Replayed):
    def step(self, action: str) -> Step:
        return super().step(action)._replace(reward=random.random())


class Remembering(Sound):
    """State of earlier episodes leaks into later ones."""

    steps = itertools.count()

    def reset(self, task: Task) -> Observation:
        seen = super().reset(task)
        return Observation(f"{seen.text} Steps ever taken: {next(self.steps)}.", seen.goal, seen.actions)


class Salted(Sound):
    def reset(self, task: Task) -> Observation:
        super().reset(task)
        self.state["at"] = -(hash(task.id) % 1000)
        return self.observe()


class Aliased(Sound):
    """Hands out its own state, which goes on changing."""

    def snapshot(self) -> Any:
        return self.state


class Shared(Sound):
    """Copies what it hands out, but plays on in what it is given."""

    def restore(self, snapshot: Any) -> Observation:
        self.state = snapshot
        return self.observe()


class Forgetful(Sound):
    """Its copy misses the turn count."""

    def snapshot(self) -> Any:
        return {**self.state, "turns": 0}


class Unlisted(Replayed):
    """Other admissible actions in every instance: seen only at a fork."""

    made = itertools.count()

    def __init__(self) -> None:
        super().__init__()
        self.extra = next(self.made)

    def observe(self) -> Observation:
        return Observation(f"You are at {self.state['at']}.", f"{self.state['task']}: reach 3")

    def list_actions(self) -> tuple[str, ...] | None:
        return ("left", "right", f"jump {self.extra}")


class FreeText(Sound):
    """Lists no action, and is unsound only where one is understood: the expert's words are needed to see it."""

    def observe(self) -> Observation:
        noise = random.random() if self.state["at"] else 0
        return Observation(f"You are at {self.state['at']} {noise}.", f"{self.state['task']}: reach 3")

    def list_actions(self) -> tuple[str, ...] | None:
        return None


class Endless(Sound):
    def step(self, action: str) -> Step:
        return super().step(action)._replace(terminated=False, truncated=False)


class Strict(Sound):
    def step(self, action: str) -> Step:
        if action not in ("left", "right"):
            raise KeyError(action)
        return super().step(action)


class IntReward(Sound):
    def step(self, action: str) -> Step:
        step = super().step(action)
        return step._replace(reward=int(step.reward))


class IntFlag(Sound):
    def step(self, action: str) -> Step:
        return super().step(action)._replace(terminated=0)  # type: ignore[arg-type]


class PlainTuple(Sound):
    def step(self, action: str) -> Step:
        return tuple(super().step(action))  # type: ignore[return-value]


class ListedAsList(Sound):
    def observe(self) -> Observation:
        seen = super().observe()
        return Observation(seen.text, seen.goal, ["left", "right"])  # type: ignore[arg-type]


class Silent(Sound):
    """Never says whether it succeeded."""

    def step(self, action: str) -> Step:
        return super().step(action)._replace(info={})


class Leaking(Sound):
    """Tests on what it trained on."""

    @classmethod
    def tasks(cls, split: str) -> Sequence[str]:
        listed = list(super().tasks(split))
        return [*listed[:-1], "train-0"] if split == "test" else listed


class Empty(Sound):
    @classmethod
    def tasks(cls, split: str) -> Sequence[str]:
        return [] if split == "test" else super().tasks(split)


class AnySplit(Sound):
    @classmethod
    def tasks(cls, split: str) -> Sequence[str]:
        return [f"{split}-{i}" for i in range(3)]


class Unpicklable(Sound):
    def step(self, action: str) -> Step:
        return super().step(action)._replace(info={"success": True, "why": lambda: None})


class Boastful(Sound):
    """Its expert stops one step short."""

    def expert(self, task: Task) -> list[str] | None:
        return ["right"] * 2


class Wandering(Sound):
    """Its goal changes on the way."""

    def observe(self) -> Observation:
        seen = super().observe()
        return Observation(seen.text, f"reach {3 + self.state['turns']}", seen.actions)
