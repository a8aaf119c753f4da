"""Advantages by name: pure functions from a group's paths to its turns' credit."""

from collections.abc import Callable
from typing import TypeAlias

from asyncrl.algo.gigpo import gigpo
from asyncrl.algo.paths import Credit, Paths
from asyncrl.algo.spark import spark
from asyncrl.config.algo import AlgoConfig

AdvantageFn: TypeAlias = Callable[[Paths, AlgoConfig], Credit]

ADVANTAGES: dict[str, AdvantageFn] = {"spark": spark, "grpo": spark, "gigpo": gigpo}
"""By the name used in ``algo.advantage``. Over chains the first two are one formula, and with ``grpo`` nothing else is
grown."""
