"""A miniature Ray: actors that live in one event loop and die like processes.

Invariants, as production code meets them in Ray 2.60: a call returns at once, arrives after a while (calls from one
process to one actor in their order), and its result or error travels back; a reference can be awaited any number of
times, and cancelling such a wait cancels nothing else; an exception in a method is raised as ``RayTaskError`` that is
also of the exception's own type; what was asked of an actor that died fails with ``ActorDiedError``, some time later;
an actor dies with the process that made it; a reference among the arguments of a call is replaced by its value, one
inside a list is not.

Left out: copies of arguments and results, which Ray makes by pickling; actors here must not change what they are given.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from inspect import iscoroutinefunction
from itertools import count
from typing import Any, NoReturn
from unittest import mock

import ray
from ray.exceptions import ActorDiedError, RayTaskError, TaskCancelledError

from tests.simulation.clock import PROCESS, Process, VirtualLoop

LATENCY_S = 0.004
"""Longest way of a call, and of an answer."""
AT_ONCE = 0.75
"""Share of answers that need no time."""
NOTICE_S = 0.5
"""Longest time in which an actor's death becomes known."""
FIFO_S = 1e-7
"""Least distance of two calls on the same way."""

NOBODY = copy_context()
"""Of what is under way: it arrives though its sender has died."""

Duration = Callable[["Actor", str], float]
"""Seconds that a call of a method which is no coroutine takes."""
Mishap = Callable[["Actor", str], Exception | None]
"""What such a call raises instead of doing its work."""
Trace = Callable[..., None]


class Ref:
    """A reference to a result that may be on its way."""

    __slots__ = ("_error", "_known", "_value", "_waiters", "call")

    def __init__(self, call: _Call) -> None:
        self.call = call
        self._known = False
        self._value: Any = None
        self._error: BaseException | None = None
        self._waiters: list[asyncio.Future[Any]] = []

    def __await__(self) -> Generator[Any, None, Any]:
        waiter = asyncio.get_running_loop().create_future()
        if self._known:
            self._tell(waiter)
        else:
            self._waiters.append(waiter)
        return waiter.__await__()

    def settle(self, value: Any, error: BaseException | None) -> None:
        if self._known:
            return
        self._known, self._value, self._error = True, value, error
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            self._tell(waiter)

    def _tell(self, waiter: asyncio.Future[Any]) -> None:
        if waiter.done():
            return
        if self._error is None:
            waiter.set_result(self._value)
        else:
            waiter.set_exception(self._error)


class _Call:
    __slots__ = ("actor", "args", "method", "over", "refs", "task")

    def __init__(self, actor: Actor, method: str, args: tuple[Any, ...], returns: int) -> None:
        self.actor, self.method, self.args = actor, method, args
        self.refs = [Ref(self) for _ in range(returns)]
        self.task: asyncio.Task[None] | None = None
        self.over = False

    def settle(self, value: Any, error: BaseException | None) -> None:
        for i, ref in enumerate(self.refs):
            ref.settle(value[i] if len(self.refs) > 1 and error is None else value, error)


class Actor(Process):
    """One actor's process; ``kind`` is the name of its class."""

    def __init__(self, kind: str, number: int, owner: Process | None) -> None:
        super().__init__(f"{kind}#{number}")
        self.kind, self.owner = kind, owner
        self.instance: Any = None
        self.calls: dict[_Call, None] = {}
        self.lanes: dict[Process | None, float] = {}
        """When the last call of each caller arrives."""
        self.busy: dict[Any, float] = {}
        """Until when each slot of an environment worker is in a call."""


class Handle:
    """An actor as others see it."""

    def __init__(self, cluster: Cluster, actor: Actor) -> None:
        self._cluster, self._actor = cluster, actor

    def __getattr__(self, name: str) -> _Method:
        if name.startswith("_"):
            raise AttributeError(name)
        method = _Method(self._cluster, self._actor, name)
        setattr(self, name, method)
        return method

    def __repr__(self) -> str:
        return f"Actor({self._actor.name})"


class _Method:
    def __init__(self, cluster: Cluster, actor: Actor, name: str, returns: int = 1) -> None:
        self._cluster, self._actor, self._name, self._returns = cluster, actor, name, returns

    def options(self, num_returns: int) -> _Method:
        return _Method(self._cluster, self._actor, self._name, num_returns)

    def remote(self, *args: Any) -> Any:
        return self._cluster.call(self._actor, self._name, args, self._returns)


class _Factory:
    """What ``ray.remote(cls)`` gives; resources, concurrency and environments mean nothing here."""

    def __init__(self, cluster: Cluster, kind: str, cls: type[Any]) -> None:
        self._cluster, self._kind, self._class = cluster, kind, cls

    def options(self, **_: Any) -> _Factory:
        return self

    def remote(self, *args: Any, **kwargs: Any) -> Handle:
        return self._cluster.start(self._kind, lambda: self._class(*args, **kwargs))


class Cluster:
    """All actors of a simulation.

    Args:
        stand_ins: classes that are started in place of others, by the others' names.
        locked: methods of a threaded actor that wait for an earlier call with the same first argument.
        instant: coroutine methods that await nothing.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        rng: random.Random,
        duration: Duration,
        mishap: Mishap,
        trace: Trace,
        stand_ins: Mapping[str, type[Any]],
        locked: Sequence[str],
        instant: Sequence[str],
    ) -> None:
        self._loop, self._rng = loop, rng
        self._duration, self._mishap, self._trace = duration, mishap, trace
        self._stand_ins = stand_ins
        self._locked, self._instant = frozenset(locked), frozenset(instant)
        self._numbers: dict[str, Iterator[int]] = {}
        self.actors: list[Actor] = []

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Production code finds this cluster behind ``ray``; what this one lacks is refused."""
        names: dict[str, Any] = {
            **dict.fromkeys(("get", "put", "wait", "init"), _refused),
            "remote": self.remote,
            "kill": self.kill,
            "cancel": self.cancel,
            "ObjectRef": Ref,
        }
        with mock.patch.multiple(ray, **names):
            yield

    def remote(self, cls: type[Any]) -> _Factory:
        return _Factory(self, cls.__name__, self._stand_ins.get(cls.__name__, cls))

    def alive(self, kind: str) -> list[Actor]:
        return [actor for actor in self.actors if actor.kind == kind and not actor.dead]

    def start(self, kind: str, make: Callable[[], Any]) -> Handle:
        owner = PROCESS.get()
        _refuse_the_dead(owner)
        actor = Actor(kind, next(self._numbers.setdefault(kind, count())), owner)
        self.actors.append(actor)
        self._trace("start", actor.name)
        actor.instance = actor.context.run(make)
        return Handle(self, actor)

    def call(self, actor: Actor, method: str, args: tuple[Any, ...], returns: int) -> Any:
        caller = PROCESS.get()
        _refuse_the_dead(caller)
        call = _Call(actor, method, args, returns)
        if actor.dead:
            self._later(self._rng.random() * NOTICE_S, call.settle, None, _died(actor))
        else:
            actor.calls[call] = None
            last = actor.lanes.get(caller, 0.0)
            arrival = max(last + FIFO_S, self._loop.time() + self._rng.random() * LATENCY_S)
            actor.lanes[caller] = arrival
            work = getattr(actor.instance, method)
            if _is_async(work) or Ref in map(type, args):
                self._loop.call_at(arrival, self._arrive, call, work, context=actor.context)
            else:
                self._loop.call_at(self._end(call, arrival), self._work, call, work, context=actor.context)
        return call.refs[0] if returns == 1 else call.refs

    def _end(self, call: _Call, arrival: float) -> float:
        """When a call that holds a thread from its arrival on will be done."""
        actor = call.actor
        if call.method not in self._locked:
            return arrival + self._duration(actor, call.method)
        end = max(arrival, actor.busy.get(call.args[0], 0.0)) + self._duration(actor, call.method)
        actor.busy[call.args[0]] = end
        return end

    def _arrive(self, call: _Call, work: Callable[..., Any]) -> None:
        self._trace("call", call.actor.name, call.method)
        if call.over:
            return
        if call.method in self._instant:  # it awaits nothing, and so needs no task
            try:
                work(*call.args).send(None)
            except StopIteration as end:
                self._finish(call, end.value, None)
            except Exception as error:
                self._finish(call, None, error)
            else:
                raise AssertionError(f"{call.actor.name}: {call.method} awaits something")
        else:
            call.task = self._loop.create_task(self._run(call, work))

    def _work(self, call: _Call, work: Callable[..., Any]) -> None:
        self._trace("done", call.actor.name, call.method)
        if call.over:
            return
        value, error = None, self._mishap(call.actor, call.method)
        if error is None:
            try:
                value = work(*call.args)
            except Exception as raised:
                error = raised
        self._finish(call, value, error)

    async def _run(self, call: _Call, work: Callable[..., Any]) -> None:
        try:
            args = [await arg if type(arg) is Ref else arg for arg in call.args]
            value = work(*args)
            self._finish(call, await value if _is_async(work) else value, None)
        except asyncio.CancelledError:
            self._finish(call, None, TaskCancelledError())
        except Exception as error:
            self._finish(call, None, error)

    def _finish(self, call: _Call, value: Any, error: BaseException | None) -> None:
        if call.actor.calls.pop(call, call) is call:  # over already
            return
        call.over = True
        if isinstance(error, Exception) and not isinstance(error, TaskCancelledError):
            error = _task_error(call, error)
        if error is not None:
            self._trace("failed", call.actor.name, call.method, type(error).__name__)
        if self._rng.random() < AT_ONCE:
            call.settle(value, error)
        else:
            self._later(self._rng.random() * LATENCY_S, call.settle, value, error)

    def kill(self, handle: Handle) -> None:
        caller = PROCESS.get()
        if caller is None or not caller.dead:
            self.die(handle._actor)

    def die(self, process: Process) -> None:
        """End a process and the actors it has made."""
        if process.dead:
            return
        self._trace("died", process.name)
        self._loop.kill(process)
        if isinstance(process, Actor):
            notice = self._rng.random() * NOTICE_S
            for call in process.calls:
                call.over = True
                self._later(notice, call.settle, None, _died(process))
            process.calls.clear()
        for actor in self.actors:
            if actor.owner is process:
                self.die(actor)

    def cancel(self, ref: Ref, recursive: bool = True) -> None:
        # A recursive one would reach what a coordinator has under way; generators have nothing.
        assert not recursive or ref.call.actor.kind != "Coordinator", "cancel a coordinator's call with recursive=False"
        caller, call = PROCESS.get(), ref.call
        if call.over or (caller is not None and caller.dead):
            return
        if call.task is not None:
            call.task.cancel()
        elif _is_async(getattr(call.actor.instance, call.method)):  # it has not arrived yet
            self._finish(call, None, TaskCancelledError())

    def _later(self, seconds: float, callback: Callable[..., None], *args: Any) -> None:
        self._loop.call_later(seconds, callback, *args, context=NOBODY)


_ASYNC: dict[Any, bool] = {}


def _is_async(method: Any) -> bool:
    function = method.__func__
    if function not in _ASYNC:
        _ASYNC[function] = iscoroutinefunction(function)
    return _ASYNC[function]


def _refuse_the_dead(caller: Process | None) -> None:
    if caller is not None and caller.dead:  # only while the dead are buried
        raise asyncio.CancelledError


def _died(actor: Actor) -> ActorDiedError:
    error = ActorDiedError()
    error.error_msg = f"{ActorDiedError.BASE_ERROR_MSG}\n\tclass_name: {actor.kind}"
    return error


def _task_error(call: _Call, error: Exception) -> Exception:
    text = f"Traceback (most recent call last):\n{type(error).__name__}: {error}"
    raised: Exception = RayTaskError(
        call.method, text, error, proctitle=call.actor.name, pid=1, ip="simulation"
    ).as_instanceof_cause()
    return raised


def _refused(*_: Any, **__: Any) -> NoReturn:
    raise AssertionError("the simulated cluster cannot block: await references instead")
