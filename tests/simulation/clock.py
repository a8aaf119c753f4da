"""An event loop in virtual time, whose tasks belong to processes that can die.

Invariants: time moves only when nothing is ready, and then straight to the next timer, so waiting costs nothing; the
order of everything is a function of what the callbacks do, never of addresses or of the machine; nothing of a dead
process ever runs again, its ``finally`` blocks included, as after ``kill -9``; when nothing is ready and no timer is
set, the run has deadlocked, and that is an error.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Any
from unittest import mock

LONGEST_FUNERAL = 1000
"""Iterations of the loop that burying the dead may take."""
MOST_STEPS = 5_000_000
"""Callbacks of one loop."""
ROOM = 64
"""Ended tasks that are kept at most, beside as many as run."""


class Deadlock(RuntimeError):
    """Nothing is ready and nothing will ever be."""


class Livelock(RuntimeError):
    """So much happens that the run will not end."""


class Process:
    """What dies at once: an actor's process, or the driver's."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.dead = False
        self.context = copy_context()
        self.context.run(PROCESS.set, self)

    def __repr__(self) -> str:
        return self.name


PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)
"""Whose code is running; None for the simulation itself."""


class _Task(asyncio.Task[Any]):
    """A task whose place in a set does not depend on its address."""

    def __init__(self, number: int, coro: Coroutine[Any, Any, Any], loop: VirtualLoop, context: Context | None) -> None:
        self.number = number
        super().__init__(coro, loop=loop, context=context)
        self.process = PROCESS.get() if context is None else context[PROCESS]

    def __hash__(self) -> int:
        return self.number


class _Handle:
    """What asyncio needs of a handle, without the rest."""

    __slots__ = ("args", "callback", "context")

    def __init__(self, callback: Callable[..., Any] | None, args: tuple[Any, ...], context: Context | None) -> None:
        self.callback, self.args = callback, args
        self.context = copy_context() if context is None else context

    def cancel(self) -> None:
        self.callback, self.args = None, ()


class VirtualLoop(asyncio.BaseEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self.create_future = partial(asyncio.Future, loop=self)  # type: ignore[method-assign]
        self._now = 0.0
        self._soon: deque[_Handle] = deque()
        self._timers: list[tuple[float, int, _Handle]] = []
        self._numbers = count()
        self._steps = 0
        self._tasks: list[_Task] = []
        """Those that have not ended, and some that have."""
        self._room = ROOM
        self._withheld: list[_Handle] = []
        self._resurrected = False

    get_debug = staticmethod(bool)
    """False, without a frame: every future asks."""

    def time(self) -> float:
        return self._now

    def create_task(self, coro: Any, *, name: object = None, context: Context | None = None) -> asyncio.Task[Any]:
        task = _Task(next(self._numbers), coro, self, context)
        self._tasks.append(task)
        if len(self._tasks) > self._room:
            self._tasks = [task for task in self._tasks if not task.done()]
            self._room = 2 * len(self._tasks) + ROOM
        return task

    def tasks_of(self, process: Process | None) -> list[_Task]:
        """Its tasks that have not ended, oldest first."""
        return [task for task in self._tasks if task.process is process and not task.done()]

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> Any:
        handle = _Handle(callback, args, context)
        self._soon.append(handle)
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> Any:
        handle = _Handle(callback, args, context)
        heappush(self._timers, (when, next(self._numbers), handle))
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> Any:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def kill(self, process: Process) -> None:
        """End a process where it stands."""
        # Its tasks stay referenced here: one that is collected runs its finally blocks.
        process.dead = True

    def bury(self) -> None:
        """Let every task end after all, by cancellation; to be called last, when the world they knew is gone."""
        self._resurrected = True
        self._soon.extend(self._withheld)
        with running(self):
            for _ in range(LONGEST_FUNERAL):
                left = [task for task in self._tasks if not task.done()]
                if not left:
                    break
                for task in left:
                    task.cancel()
                self._run_once()
        self._withheld.clear()

    def _run_once(self) -> None:
        soon, timers = self._soon, self._timers
        if not soon:
            while timers and timers[0][2].callback is None:  # cancelled
                heappop(timers)
            if not timers:
                raise Deadlock(f"at {self._now:.3f} s nothing is ready and no timer is set")
            self._now = max(self._now, timers[0][0])
            while timers and timers[0][0] <= self._now:
                soon.append(heappop(timers)[2])
        while soon and not self._stopping:  # type: ignore[attr-defined]
            handle = soon.popleft()
            callback, context = handle.callback, handle.context
            if callback is None:
                continue
            process = context.get(PROCESS)
            if process is not None and process.dead and not self._resurrected:
                self._withheld.append(handle)
                continue
            self._steps += 1
            if self._steps > MOST_STEPS:
                raise Livelock(f"at {self._now:.3f} s {self._steps} callbacks have run")
            context.run(callback, *handle.args)

    def _write_to_self(self) -> None:
        """Only other threads need to wake a loop, and there are none."""


@contextmanager
def unregistered() -> Iterator[None]:
    """asyncio keeps no set of all tasks, which would take a tenth of a schedule's time."""

    def nowhere(task: object) -> None:
        pass

    tasks = getattr(asyncio.tasks, "_scheduled_tasks" if sys.version_info >= (3, 12) else "_all_tasks")
    with mock.patch.object(tasks, "add", nowhere):
        yield


@contextmanager
def running(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Code inside sees ``loop`` as the one that runs."""
    before = asyncio._get_running_loop()
    asyncio._set_running_loop(loop)
    try:
        yield
    finally:
        asyncio._set_running_loop(before)
