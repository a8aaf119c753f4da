"""Pool, slots and workers in one process: who gets a slot, what a failure takes with it, and that no lease is lost or
given twice."""

import asyncio
import inspect
import random
import threading
from collections import defaultdict
from collections.abc import Coroutine
from functools import partial
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.exceptions import ActorDiedError, RayTaskError

from asyncrl.env import EnvSpec, ReplayMismatch, Trace
from asyncrl.rollout import pool as pool_module
from asyncrl.rollout import slot as slot_module
from asyncrl.rollout.env_worker import EnvWorker
from asyncrl.rollout.pool import EnvPool, counted
from asyncrl.rollout.slot import PoolLost, Slot, SlotLost
from asyncrl.types import Observation
from tests.unit.moody import MOODY, TASK, Moody


class Handle:
    """An actor of this process: plain methods run on threads, errors come as Ray's, death fails what is running."""

    def __init__(self, target: Any) -> None:
        self._target, self._dead = target, False
        self._running: dict[asyncio.Future[Any], asyncio.Task[None]] = {}

    def __getattr__(self, name: str) -> Any:
        return type("Method", (), {"remote": staticmethod(partial(self._begin, getattr(self._target, name)))})

    def _begin(self, method: Any, *args: Any) -> asyncio.Future[Any]:
        answer = asyncio.get_running_loop().create_future()
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody need hear it
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
    pool = LocalPool(MOODY, workers, slots, restart_limit)
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
        assert all(slot._lease.worker is pool._workers[0] for slot in fresh)
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
        assert (again._lease.worker, again._lease.slot) == (bad._lease.worker, bad._lease.slot)
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
        await take(handle, wait_s=1)
        assert pool.spawned == 2

    run(main())


def test_an_environment_that_does_not_close_cleanly_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Moody, "closing", lambda env: env.step("raise"))

    async def main() -> None:
        pool, handle = make()
        with pytest.raises(SlotLost):
            await (await take(handle)).step("raise")
        await take(handle, wait_s=1)
        assert pool.spawned == 1

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


@pytest.mark.parametrize(("action", "timeout_s", "spawned"), [("wait", 0.1, 2), ("raise", 5, 1)])
def test_a_step_that_fails_after_its_caller_left_is_reported(action: str, timeout_s: float, spawned: int) -> None:
    async def main() -> None:
        pool, handle = make()
        first = await take(handle)
        first._timeout_s = timeout_s
        stepping = asyncio.create_task(first.step(action))
        await asyncio.sleep(0)
        stepping.cancel()
        await asyncio.gather(stepping, return_exceptions=True)
        first.release()
        await take(handle, wait_s=2)
        assert (pool.spawned, len(Moody.closed)) == (spawned, 2 - spawned)

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


def test_what_a_dead_owner_held_is_free_once_no_call_runs_on_it_and_no_sooner() -> None:
    async def main() -> None:
        pool, handle = make(slots=2)
        idle = await Slot.acquire(handle, 5, 5, "dead")
        stepping = await Slot.acquire(handle, 5, 5, "dead")
        waiting = asyncio.create_task(Slot.acquire(handle, 5, 5, "dead"))
        running = asyncio.create_task(stepping.step("wait"))
        await asyncio.sleep(0.05)
        forgetting = asyncio.create_task(pool.forget("dead", 5))
        with pytest.raises(SlotLost, match="no environment slot"):
            await waiting
        with pytest.raises(SlotLost, match="no environment slot"):  # nor is it ever granted another
            await Slot.acquire(handle, 5, 5, "dead")
        first = await take(handle)
        assert first._lease.slot == idle._lease.slot
        await pool.release(idle._lease)  # late reports of the dead change nothing
        assert not await pool.fail(idle._lease, "late") and not await pool.drop(stepping._lease, "late")
        with pytest.raises(SlotLost):
            await take(handle, wait_s=0.05)
        assert not forgetting.done()
        Moody.gate.set()
        await forgetting
        second = await take(handle, wait_s=1)
        assert second._lease.slot == stepping._lease.slot and pool.spawned == 1
        await running

    run(main())


def test_a_call_of_a_dead_owner_that_does_not_end_takes_its_worker() -> None:
    async def main() -> None:
        pool, handle = make(slots=2)
        hung, neighbour = await Slot.acquire(handle, 5, 5, "dead"), await take(handle)
        running = asyncio.create_task(hung.step("wait"))
        await asyncio.sleep(0.05)
        await pool.forget("dead", 0.05)
        with pytest.raises(SlotLost):
            await neighbour.step("a")
        with pytest.raises(SlotLost):
            await running
        await take(handle, wait_s=1)
        await take(handle, wait_s=1)
        assert pool.spawned == 2

    run(main())


def test_a_call_that_does_not_end_keeps_none_of_a_dead_owners_other_slots() -> None:
    async def main() -> None:
        pool, handle = make(slots=3)
        hung, *_ = [await Slot.acquire(handle, 5, 5, "dead") for _ in range(3)]
        running = asyncio.create_task(hung.step("wait"))
        await asyncio.sleep(0.05)
        forgetting = asyncio.create_task(pool.forget("dead", 5))
        for _ in range(2):
            await take(handle, wait_s=1)
        assert not forgetting.done() and pool.spawned == 1
        Moody.gate.set()
        await asyncio.gather(forgetting, running)

    run(main())


class Worker:
    """Like :class:`EnvWorker`, in coroutines; a call that begins while another runs on its slot is noticed."""

    overlaps: ClassVar[int] = 0

    def __init__(self) -> None:
        self.running: defaultdict[int, int] = defaultdict(int)

    async def call(self, slot: int, method: str, ticks: int | None) -> None:
        Worker.overlaps += self.running[slot] > 0
        self.running[slot] += 1
        if ticks is None:
            await asyncio.sleep(60)
        for _ in range(ticks or 0):
            await asyncio.sleep(0)
        self.running[slot] -= 1
        if ticks == 1:
            raise KeyError("the environment")

    async def settle(self, slot: int) -> None:
        while self.running[slot]:
            await asyncio.sleep(0)

    async def drop(self, slot: int) -> None:
        Worker.overlaps += self.running[slot] > 0
        await asyncio.sleep(0)


class CoroutinePool(EnvPool):
    def _spawn(self) -> Any:
        return Handle(Worker())


class Audience:
    """Owners that lease, step, fail and die at random, and a record of their own of who holds what."""

    def __init__(self, seed: int, workers: int, slots: int) -> None:
        self.rng = random.Random(seed)
        self.pool = CoroutinePool(EnvSpec("none", "none:None"), workers, slots, restart_limit=10**6)
        self.handle = Handle(self.pool)
        self.total = workers * slots
        self.holders: dict[tuple[Any, int], str] = {}

    async def user(self, owner: str) -> None:
        for _ in range(self.rng.randint(1, 4)):
            lease = await self.handle.acquire.remote(5, owner)
            assert lease is not None, "only the dead are refused"
            place = lease.worker, lease.slot
            assert place not in self.holders
            self.holders[place] = owner
            report, *cause = await self._steps(lease)
            del self.holders[place]
            await report.remote(lease, *cause)

    async def _steps(self, lease: Any) -> tuple[Any, ...]:
        """How the lease ends."""
        for _ in range(self.rng.randint(0, 3)):
            ticks = self.rng.choice([1, 2, 3, 5, 8, None])
            try:
                async with asyncio.timeout(0.005 if ticks is None else 5):
                    await asyncio.shield(lease.worker.call.remote(lease.slot, "step", ticks))
            except RayTaskError:
                return self.handle.drop, "raised"
            except (TimeoutError, ActorDiedError):
                return self.handle.fail, "hung or dead"
        return (self.handle.release,)

    async def life(self, owner: str) -> None:
        users = [asyncio.create_task(self.user(owner)) for _ in range(3)]
        if self.rng.random() < 0.6:
            for _ in range(self.rng.randint(0, 20)):
                await asyncio.sleep(0)
            for task in users:
                task.cancel()
            results = await asyncio.gather(*users, return_exceptions=True)
            for place in [place for place, by in self.holders.items() if by == owner]:
                del self.holders[place]
            await self.pool.forget(owner, 0.005)
        else:
            results = await asyncio.gather(*users, return_exceptions=True)
        failures = [result for result in results if isinstance(result, Exception)]
        assert not failures, failures

    async def play(self) -> None:
        async with asyncio.TaskGroup() as lives:
            for number in range(4):
                lives.create_task(self.life(f"owner {number}"))
        free = [await self.pool.acquire(1) for _ in range(self.total)]
        places = {(id(lease.worker), lease.slot) for lease in free if lease is not None}
        assert len(places) == self.total, "a slot leaked"
        assert await self.pool.acquire(0.001) is None, "a slot doubled"


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), workers=st.integers(1, 3), slots=st.integers(1, 3))
def test_no_slot_is_ever_leased_or_called_twice_at_a_time_and_none_leaks(seed: int, workers: int, slots: int) -> None:
    Worker.overlaps = 0
    asyncio.run(Audience(seed, workers, slots).play())
    assert Worker.overlaps == 0


def test_stats_add_up_leases_waits_and_environment_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 100.0
    monkeypatch.setattr(pool_module, "now", lambda: clock)
    slow = EnvSpec("moody", "envs.delayed:Delayed", {"inner": MOODY, "median_s": 0.02, "sigma": 0.0})

    async def main() -> None:
        nonlocal clock
        pool = LocalPool(slow, 1, 2)
        handle = Handle(pool)
        await pool.ready()
        clock = 103.0
        first = await take(handle)
        await first.step("a")
        second = await take(handle)
        waiting = asyncio.create_task(take(handle))
        await asyncio.sleep(0.02)
        clock = 110.0
        first.release()
        third = await waiting
        clock = 112.0
        stats = await pool.stats()
        busy = stats.pop("env_busy_s")
        assert stats == {"env_seconds": 12.0, "leased_s": 7.0 + 9.0 + 2.0, "acquire_wait_s": 7.0}
        assert 4 * 0.02 <= busy < 4
        await pool.fail(second._lease, "gone")
        clock = 120.0
        stats = await pool.stats()
        assert (stats["leased_s"], stats["env_busy_s"]) == (18.0, 0.0)
        third.release()
        pool._workers[0].kill()
        assert (await pool.stats())["env_busy_s"] == 0.0

    run(main())


def test_counters_of_a_pool_that_does_not_say_are_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 2 * pool_module.CLOSE_TIMEOUT_S < 30, "the driver waits two minutes for all counters together"

    async def silent() -> dict[str, float]:
        await asyncio.sleep(5)
        return {}

    async def main() -> None:
        pool, handle = make()
        assert (await counted(handle)).keys() >= {"env_busy_s", "env_seconds", "leased_s", "acquire_wait_s"}
        monkeypatch.setattr(pool_module, "CLOSE_TIMEOUT_S", 0.02)
        monkeypatch.setattr(pool, "stats", silent)
        assert await counted(handle) == {}
        handle.kill()
        assert await counted(handle) == {}

    run(main())
