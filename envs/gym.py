"""The environments for users of Gymnasium: ``gymnasium.make("asyncrl/Pantry-v0")``.

Invariants: observation and action are text, with the image beside it where the environment shows one; goal, admissible
actions and task id are where Gymnasium has room for them (the observation's ``goal``, and ``info``).
``reset(seed=...)`` decides which task of the split is played and ``options={"task_id": ...}`` names one; the same task
always begins alike.
"""

import string
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

from asyncrl.env import find_env
from asyncrl.types import Observation, Task

IDS: dict[str, str] = {
    "asyncrl/ALFWorld-v0": "alfworld",
    "asyncrl/EZPoints-v0": "ezpoints",
    "asyncrl/Pantry-v0": "pantry",
    "asyncrl/ScienceWorld-v0": "scienceworld",
    "asyncrl/Sokoban-v0": "sokoban",
    "asyncrl/TextWorld-v0": "textworld",
    "asyncrl/WebShop-v0": "webshop",
}
"""Gymnasium id -> registered short name."""
MAX_TEXT = 65_536
MAX_ACTION = 256


class AnyText(spaces.Text):
    """Any string of at most ``max_length`` characters; samples are drawn from printable ASCII."""

    def __init__(self, max_length: int) -> None:
        super().__init__(max_length, min_length=0, charset=string.printable)

    def contains(self, x: Any) -> bool:
        return isinstance(x, str) and len(x) <= self.max_length


class GymEnv(gymnasium.Env[dict[str, Any], str]):
    """One asyncrl environment behind Gymnasium's interface.

    Args:
        name: registered short name, or ``module:Class``.
        split: where tasks are drawn from.
        options: keyword arguments of the environment's class.

    Raises:
        ValueError: unknown environment, split or option.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi"], "render_fps": 1}  # type: ignore[misc]

    def __init__(self, name: str, split: str = "train", render_mode: str | None = None, **options: Any) -> None:
        spec = find_env(name, options)
        self._name, self._env = name, spec.make()
        self._ids = self._env.tasks(split)
        self._seen: Observation | None = None
        self.render_mode = render_mode
        shown: dict[str, gymnasium.Space[Any]] = {"goal": AnyText(MAX_TEXT), "text": AnyText(MAX_TEXT)}
        if (shape := self._env.image_shape) is not None:
            shown["image"] = spaces.Box(0, 255, shape, np.uint8)
        self.observation_space = spaces.Dict(shown)
        self.action_space = AnyText(MAX_ACTION)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin the task ``options["task_id"]``, or one drawn from the split."""
        super().reset(seed=seed)
        drawn = self._ids[int(self.np_random.integers(len(self._ids)))]
        task = Task(self._name, str((options or {}).get("task_id", drawn)))
        seen = self._env.reset(task)
        return self._observe(seen), {**self._info(seen), "task_id": task.id}

    def step(self, action: str) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        step = self._env.step(action)
        info = {**step.info, **self._info(step.observation)}
        return self._observe(step.observation), step.reward, step.terminated, step.truncated, info

    def render(self) -> str | None:  # type: ignore[override]
        """The last observation's text in render mode ``ansi``."""
        return self._seen.text if self.render_mode == "ansi" and self._seen is not None else None

    def close(self) -> None:
        self._env.close()

    def _observe(self, seen: Observation) -> dict[str, Any]:
        self._seen = seen
        shown = {"goal": seen.goal, "text": seen.text}
        return shown if seen.image is None else {**shown, "image": seen.image}

    def _info(self, seen: Observation) -> dict[str, Any]:
        """``actions`` is the admissible list, or None where the environment does not list it in observations."""
        return {"actions": seen.actions, "action_guide": seen.action_guide}


def register() -> None:
    """Make the ids known to Gymnasium; safe to call again."""
    for gym_id, name in IDS.items():
        if gym_id not in gymnasium.registry:
            gymnasium.register(id=gym_id, entry_point="envs.gym:GymEnv", kwargs={"name": name})
