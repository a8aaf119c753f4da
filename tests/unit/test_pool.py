"""Pool, slots and workers in one process: who gets a slot, what a failure takes with it, and that no lease is lost."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any, ClassVar

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from asyncrl.env import Env, EnvSpec, ReplayMismatch, Trace
from asyncrl.rollout import pool as pool_module
from asyncrl.rollout import slot as slot_module
from asyncrl.rollout.env_worker import EnvWorker
from asyncrl.rollout.pool import EnvPool
from asyncrl.rollout.slot import PoolLost, Slot, SlotLost
from asyncrl.types import Observation, Step, Task

TASK = Task("moody", "0")


class Moody(Env):
    """Remembers its actions; some of them raise or wait for ``gate``."""

    role: ClassVar[str] = "You test."
    max_turns: ClassVar[int] = 50
    gate: ClassVar[threading.Event] = threading.Event()
    closed: ClassVar[list[Moody]] = []

    def __init__(self) -> None:
        self.seen = ""

    @classmethod
    def tasks(cls, split: str) -> Sequence[str]:
        return ["0"]

    def reset(self, task: Task) -> Observation:
        self.seen = ""
        return Observation("", goal="")

    def step(self, action: str) -> Step:
        if action == "raise":
            raise KeyError("no such thing")
        if action == "time out":  # RayTaskError is then a TimeoutError too
            raise TimeoutError("a socket of the environment's own")
        if action == "wait":
            self.gate.wait(10)
        self.seen += action
        return Step(Observation(self.seen, goal=""), 0.0, False, False, {})

    def close(self) -> None:
        self.closed.append(self)
        self.closing()

    def closing(self) -> None:
        """What a test puts here happens in ``close``."""


class Handle:
    """An actor of this process: plain methods run on threads, errors come as Ray's, death fails what is running."""

    def __init__(self, target: Any) -> None:
        self._target, self._dead = target, False
        self._running: dict[asyncio.Future[Any], asyncio.Task[None]] = {}

    def __getattr__(self, name: str) -> Any:
        return type("Method", (), {"remote": staticmethod(partial(self._begin, getattr(self._target, name)))})

    def _begin(self, method: Any, *args: Any) -> asyncio.Future[Any]:
        answer = asyncio.get_running_loop().create_future()
        if self._dead:
            answer.set_exception(ActorDiedError())
        else:
            self._running[answer] = asyncio.get_running_loop().create_task(self._run(answer, method, *args))
        return answer

    async def _run(self, answer: asyncio.Future[Any], method: Any, *args: Any) -> None:
        result, raised = None, None
        try:
            result = await (method(*args) if inspect.iscoroutinefunction(method) else asyncio.to_thread(method, *args))
        except Exception as error:
            raised = RayTaskError(method.__name__, "", error, ip="here").as_instanceof_cause()
        if self._running.pop(answer, None) and not answer.done():
            answer.set_exception(raised) if raised else answer.set_result(result)

    def kill(self) -> None:
        self._dead = True
        for answer in self._running:
            if not answer.done():
                answer.set_exception(ActorDiedError())


class LocalPool(EnvPool):
    spawned = 0

    def _spawn(self) -> Any:
        self.spawned += 1
        return Handle(EnvWorker(self._spec, self._slots))


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.kill", lambda handle: handle.kill())
    monkeypatch.setattr(Moody, "gate", threading.Event())
    monkeypatch.setattr(Moody, "closed", [])


def make(workers: int = 1, slots: int = 1, restart_limit: int = 20) -> tuple[LocalPool, Handle]:
    pool = LocalPool(EnvSpec("moody", f"{__name__}:Moody"), workers, slots, restart_limit)
    return pool, Handle(pool)


async def take(handle: Handle, wait_s: float = 5.0, timeout_s: float = 5.0) -> Slot:
    slot = await Slot.acquire(handle, timeout_s, wait_s)
    await slot.reset(TASK)
    return slot


def run(work: Coroutine[Any, Any, Any]) -> Any:
    async def whole() -> Any:
        try:
            return await work
        finally:
            Moody.gate.set()  # or the loop would wait for the thread that waits there

    return asyncio.run(whole())


def test_waiting_users_are_served_in_arrival_order_over_all_workers() -> None:
    async def main() -> list[int]:
        _, handle = make(workers=2)
        held = [await take(handle), await take(handle)]
        assert {slot._lease.index for slot in held} == {0, 1}
        served: list[int] = []

        async def user(number: int) -> None:
            slot = await take(handle)
            served.append(number)
            slot.release()
            slot.release()  # idempotent: a second release must not make a second slot

        users = [asyncio.create_task(user(i)) for i in range(6)]
        await asyncio.sleep(0.02)
        assert not served
        held[0].release()
        await asyncio.gather(*users)
        return served

    assert run(main()) == list(range(6))


def test_a_wait_that_ran_out_holds_nothing() -> None:
    async def main() -> None:
        _, handle = make()
        held = await take(handle)
        with pytest.raises(SlotLost, match="no environment slot became free within 0 s"):
            await take(handle, wait_s=0.02)
        held.release()
        await take(handle, wait_s=1)

    run(main())


@pytest.mark.parametrize("ticks", range(12))
def test_a_cancelled_waiter_does_not_leak_its_slot_whenever_it_is_cancelled(ticks: int) -> None:
    async def main() -> None:
        _, handle = make()
        held = await take(handle)
        waiter = asyncio.create_task(Slot.acquire(handle, 5, 5))
        await asyncio.sleep(0.01)
        held.release()
        for _ in range(ticks):
            await asyncio.sleep(0)
        waiter.cancel()
        (got,) = await asyncio.gather(waiter, return_exceptions=True)
        if isinstance(got, Slot):
            got.release()
        await take(handle, wait_s=1)

    run(main())


def test_a_cancelled_call_of_the_pool_itself_returns_its_grant() -> None:
    async def main() -> None:
        pool, handle = make()
        held = await take(handle)
        asked = asyncio.create_task(pool.acquire(5))
        await asyncio.sleep(0)
        pool._return(held._lease)  # granted in this instant, and cancelled in the same one
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await take(handle, wait_s=1)

    run(main())


def test_a_time_limit_replaces_the_worker_and_voids_its_leases() -> None:
    async def main() -> None:
        pool, handle = make(slots=2)
        hung, neighbour = await take(handle, timeout_s=0.05), await take(handle)
        with pytest.raises(SlotLost, match="step took longer than 0 s") as own:
            await hung.step("wait")
        with pytest.raises(SlotLost, match="ActorDied") as foreign:
            await neighbour.step("a")
        assert (own.value.own, foreign.value.own, pool.spawned) == (True, False, 2)
        stale = neighbour._lease
        await pool.release(stale)
        assert not await pool.fail(stale, "late") and not await pool.drop(stale, "later")
        assert pool.spawned == 2 and Moody.closed == []
        fresh = [await take(handle, wait_s=1), await take(handle, wait_s=1)]
        assert [slot._lease.life for slot in fresh] == [1, 1]
        with pytest.raises(SlotLost):
            await take(handle, wait_s=0.02)

    run(main())


@pytest.mark.parametrize("action", ["raise", "time out"])
def test_an_environment_that_raises_is_made_anew_and_its_neighbours_go_on(action: str) -> None:
    async def main() -> None:
        pool, handle = make(slots=2)
        bad, good = await take(handle), await take(handle)
        await good.step("a")
        with pytest.raises(SlotLost, match="step raised") as lost:
            await bad.step(action)
        assert lost.value.own
        assert (await good.step("b")).observation.text == "ab"
        assert pool.spawned == 1 and len(Moody.closed) == 1
        bad.release()  # a no-op: the pool has the slot already
        again = await take(handle, wait_s=1)
        assert again._lease == bad._lease
        assert (await again.step("c")).observation.text == "c"
        with pytest.raises(SlotLost):
            await take(handle, wait_s=0.02)
        with pytest.raises(RuntimeError, match="given back or lost"):
            await bad.step("d")

    run(main())


def test_an_environment_that_cannot_be_closed_takes_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "CLOSE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(Moody, "closing", lambda env: env.gate.wait(10))

    async def main() -> None:
        pool, handle = make()
        bad = await take(handle)
        with pytest.raises(SlotLost, match="KeyError"):
            await bad.step("raise")
        assert (await take(handle, wait_s=1))._lease.life == 1 and pool.spawned == 2

    run(main())


def test_an_environment_that_does_not_close_cleanly_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Moody, "closing", lambda env: env.step("raise"))

    async def main() -> None:
        pool, handle = make()
        with pytest.raises(SlotLost):
            await (await take(handle)).step("raise")
        assert (await take(handle, wait_s=1))._lease.life == 0 and pool.spawned == 1

    run(main())


def test_a_step_that_outlives_its_caller_keeps_the_slot_until_it_ends() -> None:
    async def main() -> None:
        pool, handle = make()
        first = await take(handle)
        stepping = asyncio.create_task(first.step("wait"))
        await asyncio.sleep(0.02)
        stepping.cancel()
        await asyncio.gather(stepping, return_exceptions=True)
        first.release()
        with pytest.raises(SlotLost):
            await take(handle, wait_s=0.05)
        Moody.gate.set()
        second = await take(handle, wait_s=1)
        assert (await second.step("a")).observation.text == "a"
        assert pool.spawned == 1

    run(main())


@pytest.mark.parametrize(("action", "life"), [("wait", 1), ("raise", 0)])
def test_a_step_that_fails_after_its_caller_left_is_reported(action: str, life: int) -> None:
    async def main() -> None:
        _, handle = make()
        first = await take(handle, timeout_s=0.1)
        stepping = asyncio.create_task(first.step(action))
        await asyncio.sleep(0)
        stepping.cancel()
        await asyncio.gather(stepping, return_exceptions=True)
        first.release()
        assert (await take(handle, wait_s=2))._lease.life == life
        assert len(Moody.closed) == 1 - life

    run(main())


def test_a_mismatch_speaks_against_the_episode_alone() -> None:
    async def main() -> None:
        pool, handle = make()
        slot = await take(handle)
        with pytest.raises(ReplayMismatch, match="expected 'elsewhere'"):
            await slot.replay(Trace(TASK, Observation("elsewhere", goal="")), None)
        assert pool.spawned == 1 and Moody.closed == []
        slot.release()
        await take(handle, wait_s=1)

    run(main())


@pytest.mark.parametrize(("slots", "raises"), [(1, 3), (2, 5)])
def test_the_pool_gives_up_with_what_to_do(slots: int, raises: int) -> None:
    async def main() -> None:
        _, handle = make(slots=slots, restart_limit=2)
        for _ in range(raises - 1):
            with pytest.raises(SlotLost):
                await (await take(handle)).step("raise")
        with pytest.raises(RuntimeError, match=rf"'moody': {raises} slots in a row.*KeyError.*env check moody"):
            await (await take(handle)).step("raise")

    run(main())


def test_one_good_return_ends_the_streak() -> None:
    async def main() -> None:
        _, handle = make(restart_limit=1)
        for _ in range(4):
            with pytest.raises(SlotLost):
                await (await take(handle)).step("raise")
            (await take(handle)).release()

    run(main())


def test_a_silent_or_dead_pool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_module, "POOL_TIMEOUT_S", 0.05)

    async def silent(*_: Any) -> None:
        await asyncio.sleep(5)

    async def main() -> None:
        pool, handle = make()
        slot = await take(handle)
        monkeypatch.setattr(pool, "drop", silent)
        with pytest.raises(PoolLost, match="pool did not answer a report of a lost environment"):
            await slot.step("raise")
        monkeypatch.setattr(pool, "acquire", silent)
        with pytest.raises(PoolLost, match="pool did not answer acquire within 0 s"):
            await take(handle, wait_s=0.01)
        handle.kill()
        with pytest.raises(PoolLost, match=r"pool is gone.*ActorDiedError"):
            await take(handle)

    run(main())
