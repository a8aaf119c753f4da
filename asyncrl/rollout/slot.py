"""One leased environment slot, as a coroutine sees it.

Invariants: every wait has a bound; a failure of the worker (death, time limit, an error raised by the environment)
becomes :class:`SlotLost` and is reported to the pool, never a reward; :class:`asyncrl.env.ReplayMismatch` passes
through, because it says something about the episode and nothing against the worker.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ray.exceptions import RayError, RayTaskError

from asyncrl.env import ReplayMismatch, Trace
from asyncrl.rollout.pool import Lease
from asyncrl.types import Observation, Step, Task


class SlotLost(Exception):
    """The environment behind a slot is gone; the message says how."""


class Slot:
    def __init__(self, pool: Any, lease: Lease, timeout_s: float) -> None:
        self._pool, self._lease, self._timeout_s = pool, lease, timeout_s
        self._held = True

    @classmethod
    async def acquire(cls, pool: Any, timeout_s: float, wait_s: float) -> Slot:
        """Wait for a free slot, at most ``wait_s``."""
        try:
            async with asyncio.timeout(wait_s):
                return cls(pool, await pool.acquire.remote(), timeout_s)
        except TimeoutError:
            raise SlotLost(f"no environment slot became free within {wait_s:.0f} s") from None

    async def reset(self, task: Task) -> Observation:
        return await self._call("reset", task)

    async def step(self, action: str) -> Step:
        return await self._call("step", action)

    async def snapshot(self) -> Any:
        return await self._call("snapshot")

    async def restore(self, snapshot: Any) -> Observation:
        return await self._call("restore", snapshot)

    async def list_actions(self) -> tuple[str, ...] | None:
        return await self._call("list_actions")

    async def replay(self, trace: Trace, actions_at_fork: tuple[str, ...] | None) -> Observation:
        return await self._call("replay", trace, actions_at_fork, timeout_s=self._timeout_s * (1 + len(trace.actions)))

    async def release(self) -> None:
        """Give the slot back; idempotent, and a no-op for a lost one."""
        if self._held:
            self._held = False
            await self._pool.release.remote(self._lease)

    async def _call(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        limit = timeout_s or self._timeout_s
        try:
            async with asyncio.timeout(limit):
                return await getattr(self._lease.worker, method).remote(self._lease.slot, *args)
        except TimeoutError:
            await self._lose(f"{method} took longer than {limit:.0f} s")
        except RayTaskError as error:
            if isinstance(error.cause, ReplayMismatch):
                raise error.cause from None
            await self._lose(f"{method} raised {error.cause!r}")
        except RayError as error:
            await self._lose(f"{method}: {type(error).__name__}: {error}")

    async def _lose(self, cause: str) -> None:
        if self._held:
            self._held = False
            await self._pool.fail.remote(self._lease, cause)
        raise SlotLost(cause)
