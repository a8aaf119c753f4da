"""One leased environment slot, as a coroutine sees it.

Invariants:

* Every wait has a bound, waits for the pool included. A failure of the worker (death, time limit) or of the environment
  (it raised) is reported to the pool and becomes :class:`SlotLost`, never a reward;
  :class:`asyncrl.env.ReplayMismatch` passes through: it speaks against the episode, not against the environment.
* A call that was begun goes on when its caller is cancelled, so ``release`` gives the lease back only after that call
  has ended or has failed: the next tenant never meets a stale step.
* A lease that the pool grants is held, returned or reported by someone, also when the one who asked is cancelled.
"""

import asyncio
import logging
from collections.abc import Awaitable
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn, Self

from ray.exceptions import RayError, RayTaskError, UnserializableException

from asyncrl.env import ReplayMismatch, Trace
from asyncrl.rollout.pool import Lease
from asyncrl.types import Observation, Step, Task

log = logging.getLogger(__name__)

POOL_TIMEOUT_S = 60.0
"""The pool answers at once, except that it waits for an environment to close; see ``pool.CLOSE_TIMEOUT_S``."""
_BACKGROUND: set[asyncio.Task[None]] = set()
"""The event loop keeps only weak references to tasks."""


class SlotLost(Exception):
    """The environment behind a slot is gone; the message says how.

    ``own`` is False where another slot's failure took the worker, and this one with it.
    """

    def __init__(self, cause: str, own: bool = True) -> None:
        super().__init__(cause)
        self.own = own


class PoolLost(RuntimeError):
    """The pool itself is gone or silent: nothing can be stepped any more."""


class Slot:
    def __init__(self, pool: Any, lease: Lease, timeout_s: float) -> None:
        self._pool, self._lease, self._timeout_s = pool, lease, timeout_s
        self._held = True
        self._call: tuple[str, asyncio.Future[Any], float] | None = None
        """The last call: its method, result and time limit in seconds."""

    @classmethod
    async def acquire(cls, pool: Any, timeout_s: float, wait_s: float, owner: str = "") -> Self:
        """Wait for a free slot, at most ``wait_s``; its calls may take ``timeout_s`` each.

        ``owner`` is the name by which the pool may be told to forget who asks (:meth:`EnvPool.forget`).

        Raises:
            SlotLost: no slot became free.
            PoolLost: the pool died or does not answer.
        """
        asked = asyncio.ensure_future(pool.acquire.remote(wait_s, owner))
        try:
            lease = await _answer(asyncio.shield(asked), "acquire", wait_s)
        except BaseException:  # above all a cancelled wait: the pool may grant it all the same
            asked.add_done_callback(partial(_return_unused, pool))
            raise
        if lease is None:
            raise SlotLost(f"no environment slot became free within {wait_s:.0f} s")
        return cls(pool, lease, timeout_s)

    async def reset(self, task: Task) -> Observation:
        return await self._do("reset", task)

    async def step(self, action: str) -> Step:
        return await self._do("step", action)

    async def snapshot(self) -> Any:
        return await self._do("snapshot")

    async def restore(self, snapshot: Any) -> Observation:
        return await self._do("restore", snapshot)

    async def list_actions(self) -> tuple[str, ...] | None:
        return await self._do("list_actions")

    async def replay(self, trace: Trace, actions_at_fork: tuple[str, ...] | None) -> Observation:
        return await self._do("replay", trace, actions_at_fork, timeout_s=self._timeout_s * (1 + len(trace.actions)))

    def release(self) -> None:
        """Give the slot back, in the background; idempotent, and a no-op for a lost one."""
        if self._held:
            self._held = False
            task = asyncio.ensure_future(self._give_back())
            _BACKGROUND.add(task)
            task.add_done_callback(_BACKGROUND.discard)

    async def _do(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        if not self._held:
            raise RuntimeError(f"{method} on an environment slot that was given back or lost; acquire another")
        running = asyncio.ensure_future(self._lease.worker.call.remote(self._lease.slot, method, *args))
        running.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may be left to hear it
        self._call = method, running, timeout_s or self._timeout_s
        return await self._outcome(*self._call)

    async def _outcome(self, method: str, running: asyncio.Future[Any], limit: float) -> Any:
        try:
            async with asyncio.timeout(limit):
                return await asyncio.shield(running)
        except (RayTaskError, UnserializableException) as error:  # before TimeoutError: it is both if that was raised
            cause = getattr(error, "cause", error)
            if isinstance(cause, ReplayMismatch):
                raise cause from None
            await self._lose(self._pool.drop, f"{method} raised {cause!r}")
        except TimeoutError:
            await self._lose(self._pool.fail, f"{method} took longer than {limit:.0f} s")
        except RayError as error:
            await self._lose(self._pool.fail, f"{method}: {type(error).__name__}: {error}")

    async def _lose(self, report: Any, cause: str) -> NoReturn:
        self._held = False
        raise SlotLost(cause, own=await _answer(report.remote(self._lease, cause), "a report of a lost environment"))

    async def _give_back(self) -> None:
        try:
            if self._call is not None:
                with suppress(ReplayMismatch):
                    await self._outcome(*self._call)
            await _answer(self._pool.release.remote(self._lease), "release")
        except (SlotLost, RuntimeError) as error:
            log.warning("an environment slot could not be given back: %s", error)


async def _answer(asked: Awaitable[Any], what: str, wait_s: float = 0.0) -> Any:
    """What the pool answers, within ``wait_s`` and the pool's own time. Raises PoolLost, or what the pool raised."""
    limit = wait_s + POOL_TIMEOUT_S
    try:
        async with asyncio.timeout(limit):
            return await asked
    except RayTaskError as error:
        raise error.cause from None
    except TimeoutError:
        raise PoolLost(f"the environment pool did not answer {what} within {limit:.0f} s; see its log") from None
    except RayError as error:
        raise PoolLost(f"the environment pool is gone; see its log ({type(error).__name__}: {error})") from error


def _return_unused(pool: Any, asked: asyncio.Future[Lease | None]) -> None:
    if not asked.cancelled() and asked.exception() is None and (lease := asked.result()) is not None:
        Slot(pool, lease, 0.0).release()
