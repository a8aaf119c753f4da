"""An environment that remembers its actions and fails on request."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import ClassVar

from asyncrl.env import Env, EnvSpec
from asyncrl.types import Observation, Step, Task

TASK = Task("moody", "0")
MOODY = EnvSpec("moody", f"{__name__}:Moody")


class Moody(Env):
    """Remembers its actions; some of them raise or wait for ``gate``."""

    role: ClassVar[str] = "You test."
    max_turns: ClassVar[int] = 50
    can_snapshot: ClassVar[bool] = True
    gate: ClassVar[threading.Event] = threading.Event()
    closed: ClassVar[list[Moody]] = []

    def __init__(self) -> None:
        self.seen = ""

    @classmethod
    def tasks(cls, split: str) -> Sequence[str]:
        return ["0"]

    def reset(self, task: Task) -> Observation:
        self.seen = ""
        return Observation("", goal="")

    def step(self, action: str) -> Step:
        if action == "raise":
            raise KeyError("no such thing")
        if action == "time out":  # RayTaskError is then a TimeoutError too
            raise TimeoutError("a socket of the environment's own")
        if action == "wait":
            self.gate.wait(10)
        self.seen += action
        return Step(Observation(self.seen, goal=""), 0.0, False, False, {})

    def snapshot(self) -> str:
        return self.seen

    def restore(self, snapshot: str) -> Observation:
        self.seen = snapshot
        return Observation(self.seen, goal="")

    def close(self) -> None:
        self.closed.append(self)
        self.closing()

    def closing(self) -> None:
        """What a test puts here happens in ``close``."""
