"""A Ray actor that holds environment slots.

Invariant: a slot has one user at a time (the pool leases it), so calls on one slot never overlap; calls on different
slots of one worker run on its threads. Environments are made on first use and kept: a slot is reset, and remade only
after the pool dropped it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncrl.env import Env, EnvSpec, Trace, replay
from asyncrl.types import Observation, Step, Task


class EnvWorker:
    def __init__(self, spec: EnvSpec, slots: int) -> None:
        self._spec = spec
        self._envs: list[Env | None] = [None] * slots

    def _env(self, slot: int) -> Env:
        env = self._envs[slot]
        if env is None:
            env = self._envs[slot] = self._spec.make()
        return env

    def reset(self, slot: int, task: Task) -> Observation:
        return self._env(slot).reset(task)

    def step(self, slot: int, action: str) -> Step:
        return self._env(slot).step(action)

    def snapshot(self, slot: int) -> Any:
        return self._env(slot).snapshot()

    def list_actions(self, slot: int) -> tuple[str, ...] | None:
        return self._env(slot).list_actions()

    def restore(self, slot: int, snapshot: Any) -> Observation:
        return self._env(slot).restore(snapshot)

    def replay(self, slot: int, trace: Trace, actions_at_fork: Sequence[str] | None) -> Observation:
        """Rebuild an episode and verify every step; raises :class:`asyncrl.env.ReplayMismatch`."""
        return replay(self._env(slot), trace, None if actions_at_fork is None else tuple(actions_at_fork))

    def ready(self) -> bool:
        return True

    def drop(self, slot: int) -> None:
        """Forget and close the environment of one slot; its next use makes another."""
        env, self._envs[slot] = self._envs[slot], None
        if env is not None:
            env.close()

    def close(self) -> None:
        for slot in range(len(self._envs)):
            self.drop(slot)
