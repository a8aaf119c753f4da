"""Leases of environment slots.

Invariants: a slot is leased to at most one user at a time; waiting users are served in arrival order; a worker that
died, hung or answered with an error of its own is killed and replaced, and every lease on it becomes void. The pool
never steps an environment itself: users await the worker directly.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass
from typing import Any

import ray

from asyncrl.env import EnvSpec
from asyncrl.rollout.env_worker import EnvWorker

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to use one slot of one worker until it is given back."""

    worker: Any
    """Actor handle of :class:`EnvWorker`."""
    index: int
    """Which worker of the pool."""
    generation: int
    """How often that worker had been replaced when the lease was made."""
    slot: int


class EnvPool:
    """The actor that owns the workers. ``restart_limit`` replacements without one lease returned well end the run."""

    def __init__(self, spec: EnvSpec, workers: int, slots: int, restart_limit: int = 20) -> None:
        self._spec, self._slots, self._restart_limit = spec, slots, restart_limit
        self._generation = [0] * workers
        self._workers = [self._spawn(slots) for _ in range(workers)]
        self._free: deque[tuple[int, int, int]] = deque(
            (worker, 0, slot) for slot in range(slots) for worker in range(workers)
        )
        self._waiting: deque[asyncio.Future[Lease]] = deque()
        self._bad_streak = 0
        self._restarts = 0

    def _spawn(self, slots: int) -> Any:
        # A fraction of a CPU: environments mostly wait; the worker's own threads are what runs at once.
        return ray.remote(EnvWorker).options(num_cpus=0.1, max_concurrency=slots).remote(self._spec, slots)

    async def ready(self) -> bool:
        """Returns when every worker answers."""
        await asyncio.gather(*(worker.ready.remote() for worker in self._workers))
        return True

    async def acquire(self) -> Lease:
        future: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._serve()
        return await future

    def _serve(self) -> None:
        while self._waiting and self._free:
            if self._waiting[0].done():  # its caller gave up
                self._waiting.popleft()
                continue
            index, generation, slot = self._free.popleft()
            if generation != self._generation[index]:
                continue
            self._waiting.popleft().set_result(Lease(self._workers[index], index, generation, slot))

    async def release(self, lease: Lease) -> None:
        if lease.generation == self._generation[lease.index]:
            self._bad_streak = 0
            self._free.append((lease.index, lease.generation, lease.slot))
            self._serve()

    async def fail(self, lease: Lease, cause: str) -> None:
        """The worker of ``lease`` cannot be trusted any more: replace it. Later reports of the same death are no-ops.

        Raises:
            RuntimeError: workers keep failing; something is wrong with the environment itself.
        """
        if lease.generation != self._generation[lease.index]:
            return
        self._bad_streak += 1
        if self._bad_streak > self._restart_limit:
            raise RuntimeError(
                f"environment {self._spec.name!r}: {self._bad_streak} env workers in a row failed without one "
                f"finished episode; the last said: {cause}. Run `asyncrl env check {self._spec.name}`"
            )
        log.warning("env worker %d (%s) is replaced: %s", lease.index, self._spec.name, cause)
        ray.kill(self._workers[lease.index])
        self._restarts += 1
        self._generation[lease.index] += 1
        self._workers[lease.index] = self._spawn(self._slots)
        generation = self._generation[lease.index]
        self._free.extend((lease.index, generation, slot) for slot in range(self._slots))
        self._serve()

    async def restarts(self) -> int:
        return self._restarts

    async def close(self) -> None:
        closing = [worker.close.remote() for worker in self._workers]
        await asyncio.wait([asyncio.ensure_future(_settled(ref)) for ref in closing], timeout=10)
        for worker in self._workers:
            ray.kill(worker)


async def _settled(ref: Any) -> None:
    try:
        await ref
    except ray.exceptions.RayError as error:
        log.warning("env worker did not close cleanly: %s", error)
