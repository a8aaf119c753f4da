"""Which environment, and the workers that run it."""

from typing import Any

from pydantic import Field

from asyncrl.config.base import Strict
from asyncrl.env import EnvSpec, find_env


class LatencyConfig(Strict):
    """Extra seconds of every reset and step, log-normal: a slow environment to measure with, not to train with."""

    median_s: float = Field(0.3, ge=0)
    sigma: float = Field(1.2, ge=0)
    """Standard deviation of the logarithm; 1.2 makes the mean 2.05 medians and one call in a hundred 16 medians."""


class EnvConfig(Strict):
    name: str
    """Registered short name, or ``module:Class``."""
    options: dict[str, Any] = {}
    """Keyword arguments of the environment's class."""
    train_split: str = "train"
    test_split: str = "test"
    max_turns: int | None = Field(None, ge=1)
    """Turns of an episode; None takes the environment's own limit."""
    workers: int = Field(1, ge=1)
    """Env worker actors."""
    slots_per_worker: int = Field(8, ge=1)
    """Live environments in one worker; a worker steps one at a time unless the environment releases the GIL."""
    step_timeout_s: float = Field(60, gt=0)
    """Longest a reset, step or restore may take before the slot counts as lost."""
    latency: LatencyConfig | None = None

    @property
    def spec(self) -> EnvSpec:
        """What ``name`` and ``options`` stand for. Raises ValueError as :func:`asyncrl.env.find_env`."""
        return find_env(self.name, self.options)

    @property
    def slots(self) -> int:
        """Of all workers together."""
        return self.workers * self.slots_per_worker
