"""Leases of environment slots.

Invariants: a slot is leased to at most one user at a time; waiting users are served in arrival order; a worker that
died or hung is killed and replaced, and every lease on it becomes void; an environment that raised is closed and made
anew without touching its neighbours; a report on a void lease changes nothing. The pool never steps an environment
itself: users await the worker directly.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

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
    life: int
    """How often that worker had been replaced when the lease was made."""
    slot: int


class EnvPool:
    """The actor that owns the workers.

    It gives up when, without one lease returned well, environments are lost as often as ``restart_limit`` workers hold
    slots: a lost worker counts all its slots, an environment that raised counts one.
    """

    def __init__(self, spec: EnvSpec, workers: int, slots: int, restart_limit: int = 20) -> None:
        self._spec, self._slots, self._limit = spec, slots, restart_limit * slots
        self._lives = [0] * workers
        self._workers = [self._spawn() for _ in range(workers)]
        self._free = deque(Lease(worker, i, 0, slot) for slot in range(slots) for i, worker in enumerate(self._workers))
        self._waiting: deque[asyncio.Future[Lease]] = deque()
        self._lost_in_a_row = 0

    def _spawn(self) -> Any:
        worker = ray.remote(EnvWorker).options(num_cpus=WORKER_CPUS, max_concurrency=self._slots)
        return worker.remote(self._spec, self._slots)

    async def ready(self) -> bool:
        """Returns when every worker answers."""
        await asyncio.gather(*(worker.ready.remote() for worker in self._workers))
        return True

    async def acquire(self, wait_s: float) -> Lease | None:
        """The next free slot, or None when none is granted within ``wait_s``."""
        waiter: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        self._serve()
        try:
            await asyncio.wait([waiter], timeout=wait_s)
            return waiter.result() if waiter.done() else None
        except asyncio.CancelledError:
            if waiter.done():
                self._return(waiter.result())
            raise
        finally:
            waiter.cancel()

    def _serve(self) -> None:
        while self._waiting and self._free:
            if self._waiting[0].done():  # its caller gave up
                self._waiting.popleft()
            elif self._void(lease := self._free.popleft()):
                continue
            else:
                self._waiting.popleft().set_result(lease)

    def _return(self, lease: Lease) -> None:
        if not self._void(lease):
            self._free.append(lease)
            self._serve()

    def _void(self, lease: Lease) -> bool:
        return lease.life != self._lives[lease.index]

    async def release(self, lease: Lease) -> None:
        if not self._void(lease):
            self._lost_in_a_row = 0
            self._return(lease)

    async def fail(self, lease: Lease, cause: str) -> bool:
        """The worker of ``lease`` cannot be trusted any more: replace it.

        Returns:
            False where the lease was void already: the worker was replaced for another slot's failure.

        Raises:
            RuntimeError: environments keep failing; something is wrong with the environment itself.
        """
        if self._void(lease):
            return False
        self._count(self._slots, cause)
        self._replace(lease.index, cause)
        return True

    async def drop(self, lease: Lease, cause: str) -> bool:
        """The environment of ``lease`` raised: close it and have another made. Returns and raises as ``fail``."""
        if self._void(lease):
            return False
        self._count(1, cause)
        log.warning("an environment of worker %d (%s) is made anew: %s", lease.index, self._spec.name, cause)
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await lease.worker.drop.remote(lease.slot)
        except RayTaskError as error:  # it is forgotten all the same
            log.warning("an environment (%s) did not close cleanly: %r", self._spec.name, error.cause)
        except (TimeoutError, RayError) as error:
            if not self._void(lease):
                self._replace(lease.index, f"an environment that raised could not be closed: {error!r}")
        self._return(lease)
        return True

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
        self._lives[index] += 1
        self._workers[index] = worker = self._spawn()
        self._free.extend(Lease(worker, index, self._lives[index], slot) for slot in range(self._slots))
        self._serve()

    async def close(self) -> None:
        closing = [worker.close.remote() for worker in self._workers]
        await asyncio.wait([asyncio.ensure_future(_settled(ref)) for ref in closing], timeout=CLOSE_TIMEOUT_S)
        for worker in self._workers:
            ray.kill(worker)


async def _settled(ref: Any) -> None:
    try:
        await ref
    except RayError as error:
        log.warning("env worker did not close cleanly: %s", error)
