"""Leases of environment slots.

Invariants: a slot is leased to at most one user at a time; waiting users are served in arrival order; a worker that
died or hung is killed and replaced, and every lease on it becomes void; an environment that raised is closed and made
anew without touching its neighbours; a report on a void lease changes nothing; a slot of an owner that died is free
again once no call runs on it. The pool never steps an environment itself: users await the worker directly.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from asyncrl.engine.waits import bounded, now
from asyncrl.env import EnvSpec
from asyncrl.rollout.env_worker import EnvWorker

log = logging.getLogger(__name__)

WORKER_CPUS = 0.1
"""What a worker reserves: environments mostly wait, and its own threads are what runs at once."""
CLOSE_TIMEOUT_S = 10.0
"""How long environments may take to close before their worker is killed."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to use one slot of one worker until it is given back."""

    worker: Any
    """Actor handle of :class:`EnvWorker`."""
    index: int
    """Which worker of the pool."""
    slot: int
    grant: int = 0
    """Unique number of the lease; 0 while the slot is free."""


class EnvPool:
    """The actor that owns the workers.

    It gives up when, without one lease returned well, environments are lost as often as ``restart_limit`` workers hold
    slots: a lost worker counts all its slots, an environment that raised counts one.
    """

    def __init__(self, spec: EnvSpec, workers: int, slots: int, restart_limit: int = 20) -> None:
        self._spec, self._slots, self._limit = spec, slots, restart_limit * slots
        self._workers = [self._spawn() for _ in range(workers)]
        self._free = deque(Lease(worker, i, slot) for slot in range(slots) for i, worker in enumerate(self._workers))
        self._waiting: deque[tuple[str, asyncio.Future[Lease | None]]] = deque()
        self._held: dict[int, tuple[Lease, str, float]] = {}
        """By grant: the lease, its owner and since when."""
        self._grants = count(1)
        self._dead: set[str] = set()
        self._lost_in_a_row = 0
        self._ready_at = self._leased_s = self._waited_s = 0.0

    def _spawn(self) -> Any:
        # Threads enough that a step never waits for the pool's own questions, one a slot and two more, nor they for it.
        worker = ray.remote(EnvWorker).options(num_cpus=WORKER_CPUS, max_concurrency=2 * self._slots + 2)
        return worker.remote(self._spec, self._slots)

    async def ready(self) -> bool:
        """Returns when every worker answers."""
        await asyncio.gather(*(worker.ready.remote() for worker in self._workers))
        self._ready_at = now()
        return True

    async def stats(self) -> dict[str, float]:
        """Totals since ``ready``, in seconds: of slots leased, of slots in environment calls (ended ones, of workers
        that live), of users waiting for slots, and of the pool's own life."""
        at = now()
        leased_s = self._leased_s + sum(at - since for _, _, since in self._held.values())
        busy = await asyncio.gather(*(_or_none(worker.busy_s.remote()) for worker in self._workers))
        return {
            "env_busy_s": sum(seconds or 0.0 for seconds in busy),
            "env_seconds": at - self._ready_at,
            "leased_s": leased_s,
            "acquire_wait_s": self._waited_s,
        }

    async def acquire(self, wait_s: float, owner: str = "") -> Lease | None:
        """The next free slot, or None when ``owner`` is granted none within ``wait_s`` or was forgotten."""
        if owner in self._dead:
            return None
        waiter: asyncio.Future[Lease | None] = asyncio.get_running_loop().create_future()
        asked = now()
        self._waiting.append((owner, waiter))
        self._serve()
        try:
            await asyncio.wait([waiter], timeout=wait_s)
            return waiter.result() if waiter.done() else None
        except asyncio.CancelledError:
            if waiter.done() and (lease := waiter.result()):
                self._return(lease)
            raise
        finally:
            self._waited_s += now() - asked
            waiter.cancel()

    def _serve(self) -> None:
        while self._waiting and self._free:
            owner, waiter = self._waiting[0]
            if waiter.done():  # its caller gave up
                self._waiting.popleft()
            elif self._of_this_life(lease := self._free.popleft()):
                self._waiting.popleft()
                lease = replace(lease, grant=next(self._grants))
                self._held[lease.grant] = lease, owner, now()
                waiter.set_result(lease)

    def _of_this_life(self, lease: Lease) -> bool:
        return bool(lease.worker == self._workers[lease.index])

    def _end(self, lease: Lease) -> bool:
        """Make a lease void, its slot not yet free; False where it was void already."""
        if held := self._held.pop(lease.grant, None):
            self._leased_s += now() - held[2]
        return held is not None

    def _put(self, lease: Lease) -> None:
        self._free.append(lease)
        self._serve()

    def _return(self, lease: Lease) -> bool:
        if ended := self._end(lease):
            self._put(lease)
        return ended

    async def release(self, lease: Lease) -> None:
        if self._return(lease):
            self._lost_in_a_row = 0

    async def forget(self, owner: str, call_s: float) -> None:
        """``owner`` died: grant it nothing more, and free its slots, each when no call runs on it any more; a worker in
        which a call takes longer than ``call_s`` is replaced."""
        self._dead.add(owner)
        for asking, waiter in self._waiting:
            if asking == owner and not waiter.done():
                waiter.set_result(None)
        held = list(self._held.values())
        ended = [lease for lease, by, _ in held if by == owner and self._end(lease)]
        settled = [self._vacate(lease, lease.worker.settle.remote(lease.slot), call_s) for lease in ended]
        await asyncio.gather(*settled)

    async def fail(self, lease: Lease, cause: str) -> bool:
        """The worker of ``lease`` cannot be trusted any more: replace it.

        Returns False where the lease was void already: the worker was replaced for another slot's failure.

        Raises RuntimeError: environments keep failing; something is wrong with the environment itself.
        """
        if not self._end(lease):
            return False
        self._count(self._slots, cause)
        self._replace(lease.index, cause)
        return True

    async def drop(self, lease: Lease, cause: str) -> bool:
        """The environment of ``lease`` raised: close it and have another made. Returns and raises as ``fail``."""
        if not self._end(lease):
            return False
        self._count(1, cause)
        log.warning("an environment of worker %d (%s) is made anew: %s", lease.index, self._spec.name, cause)
        await self._vacate(lease, lease.worker.drop.remote(lease.slot), CLOSE_TIMEOUT_S)
        return True

    async def _vacate(self, lease: Lease, vacated: Awaitable[None], limit_s: float) -> None:
        """Free the slot of an ended lease once ``vacated`` has come; replace its worker where that takes too long."""
        try:
            async with asyncio.timeout(limit_s):
                await vacated
        except RayTaskError as error:  # it is dropped all the same
            log.warning("an environment (%s) did not close cleanly: %r", self._spec.name, error.cause)
        except (TimeoutError, RayError) as error:
            if self._of_this_life(lease):
                self._replace(lease.index, f"a slot was not vacated within {limit_s:.0f} s: {error!r}")
        finally:  # also when the report is cancelled: nobody else would give the slot back
            self._put(lease)

    def _count(self, lost: int, cause: str) -> None:
        self._lost_in_a_row += lost
        if self._lost_in_a_row > self._limit:
            raise RuntimeError(
                f"environment {self._spec.name!r}: {self._lost_in_a_row} slots in a row were lost without one "
                f"finished episode; the last said: {cause}. Run `asyncrl env check {self._spec.name}`"
            )

    def _replace(self, index: int, cause: str) -> None:
        log.warning("env worker %d (%s) is replaced: %s", index, self._spec.name, cause)
        ray.kill(self._workers[index])
        for lease in [lease for lease, _, _ in self._held.values() if lease.index == index]:
            self._end(lease)
        self._workers[index] = worker = self._spawn()
        self._free.extend(Lease(worker, index, slot) for slot in range(self._slots))
        self._serve()

    async def close(self) -> None:
        await asyncio.gather(*(_or_none(worker.close.remote()) for worker in self._workers))
        for worker in self._workers:
            ray.kill(worker)


async def counted(pool: Any) -> dict[str, float]:
    """:meth:`EnvPool.stats` of the actor ``pool``; nothing if it is dead, or does not answer soon."""
    return await _or_none(pool.stats.remote(), "the environment pool", 2 * CLOSE_TIMEOUT_S) or {}


async def _or_none(answer: Awaitable[Any], who: str = "an env worker", seconds: float = CLOSE_TIMEOUT_S) -> Any:
    """None from one that is dead, or does not answer in time."""
    try:
        async with bounded(seconds, f"the answer of {who}"):
            return await answer
    except (TimeoutError, RayError) as error:
        log.warning("%s did not answer: %r", who, error)
        return None
