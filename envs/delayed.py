"""Any environment, slowed down: its resets and steps take extra seconds, to measure with and not to train with.

Invariant: the same episode (a task and its actions) takes the same extra time wherever it is played or replayed.
"""

import math
import random
import time
from collections.abc import Sequence
from typing import Any

from asyncrl.env import Env, EnvSpec
from asyncrl.types import Observation, Step, Task

LONGEST_S = 30.0
"""Longest extra latency of one call: the tail must not reach the time limit of a step."""


class Delayed(Env):
    """A slot of ``inner``; what is asked of a class (role, tasks, limits) is asked of that environment's own."""

    def __init__(self, inner: EnvSpec, median_s: float, sigma: float) -> None:
        """The extra time is log-normal: its median, and the standard deviation of its logarithm."""
        self._env, self._median_s, self._sigma, self._episode = inner.make(), median_s, sigma, ""

    @classmethod
    def tasks(cls, split: str) -> Sequence[str]:
        raise ValueError(f"split {split!r}: ask the environment within")

    def reset(self, task: Task) -> Observation:
        self._wait(f"{task.env}/{task.id}/{task.seed}")
        return self._env.reset(task)

    def step(self, action: str) -> Step:
        self._wait(f"{self._episode}\n{action}")
        return self._env.step(action)

    def list_actions(self) -> tuple[str, ...] | None:
        return self._env.list_actions()

    def snapshot(self) -> Any:
        return self._episode, self._env.snapshot()

    def restore(self, snapshot: Any) -> Observation:
        self._episode, inner = snapshot
        return self._env.restore(inner)

    def close(self) -> None:
        self._env.close()

    def _wait(self, episode: str) -> None:
        self._episode = episode
        extra_s = self._median_s * math.exp(self._sigma * random.Random(episode).gauss(0, 1))
        time.sleep(min(extra_s, LONGEST_S))
