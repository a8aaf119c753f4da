"""A Ray actor that holds environment slots.

Invariant: a slot has one user at a time (the pool leases it), so calls on one slot never overlap; calls on different
slots of one worker run on its threads. Environments are made on first use and kept: a slot is reset, and remade only
after the pool dropped it.
"""

import threading
import time
from typing import Any

from asyncrl.env import Env, EnvSpec, replay


class EnvWorker:
    def __init__(self, spec: EnvSpec, slots: int) -> None:
        self._spec = spec
        self._envs: list[Env | None] = [None] * slots
        self._calls = [threading.Lock() for _ in range(slots)]
        self._busy_s = [0.0] * slots

    def call(self, slot: int, method: str, *args: Any) -> Any:
        """Call a method of the environment of a slot, which is made if need be; its time counts as busy.

        ``replay`` with (trace, actions at the fork) rebuilds an episode and verifies every step of it.

        Raises ReplayMismatch: from ``replay``.
        """
        with self._calls[slot]:
            began = time.monotonic()
            try:
                env = self._envs[slot]
                if env is None:
                    self._envs[slot] = env = self._spec.make()
                return replay(env, *args) if method == "replay" else getattr(env, method)(*args)
            finally:
                self._busy_s[slot] += time.monotonic() - began

    def ready(self) -> bool:
        return True

    def settle(self, slot: int) -> None:
        """Returns when no call runs on the slot."""
        with self._calls[slot]:
            return

    def busy_s(self) -> float:
        """Seconds that all slots together have spent in environment calls that have ended."""
        return sum(self._busy_s)

    def drop(self, slot: int) -> None:
        """Forget and close the environment of one slot; its next use makes another."""
        env, self._envs[slot] = self._envs[slot], None
        if env is not None:
            env.close()

    def close(self) -> None:
        for slot in range(len(self._envs)):
            self.drop(slot)
