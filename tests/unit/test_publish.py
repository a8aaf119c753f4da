"""Publishing to generators that fail, die or come late: real fleet, client and gate; Ray and weights are stand-ins."""

import asyncio
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.exceptions import ActorDiedError, GetTimeoutError

from asyncrl.config.engine import EngineConfig
from asyncrl.engine import client as client_module
from asyncrl.engine import fleet as fleet_module
from asyncrl.engine.base import EngineDied, EngineFenced
from asyncrl.engine.client import GeneratorClient
from asyncrl.engine.fleet import Fleet, GenerationFailed, GeneratorDied
from asyncrl.runtime.publish import logprob_gap, publish
from asyncrl.types import Sampling
from tests.scripted_engine import ScriptedEngine

SAMPLING = Sampling(temperature=1.0, max_tokens=4)
CONFIG = EngineConfig(generate_timeout_s=0.5)
STEPS = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")
CALLS = ("pause", *STEPS, "update_weight_version", "resume")
BUCKETS = 3


class Late(Exception):
    """An answer that never comes within the bound."""


class Holder(ScriptedEngine):
    """Holds weights as the buckets it has received, and fails as told."""

    def __init__(self) -> None:
        super().__init__(lambda prompt, sampling, key, version, source: [version])
        self.weights = [0] * BUCKETS
        self.received = 0
        self.fails: dict[str, Exception] = {}
        self.killed = False
        self.init_info: dict[str, Any] = {}

    async def init_weight_transfer_engine(self, request: dict[str, Any]) -> None:
        self.init_info = request

    async def start_weight_update(self, round: int) -> None:
        await super().start_weight_update(round)
        self.received = 0

    async def update_weights(self, round: int, request: dict[str, Any]) -> None:
        await super().update_weights(round, request)
        self.weights[self.received] = request["version"]
        self.received += 1


@dataclass
class Ref:
    """What a remote call returns: awaited by the fleet, taken by the client."""

    engine: Holder
    method: str
    args: tuple[Any, ...]

    def late(self) -> bool:
        return isinstance(self.engine.fails.get(self.method), Late)

    async def answer(self) -> Any:
        if self.engine.killed:
            raise ActorDiedError
        failure = self.engine.fails.get(self.method) or self.engine.fails.get("")
        if failure is not None:
            if not isinstance(failure, ActorDiedError) and self.method == "finish_weight_update":
                self.engine.received = 0  # whatever it was doing, it did not come to its end
            raise failure
        return await getattr(self.engine, self.method)(*self.args)

    def __await__(self) -> Generator[Any, None, Any]:
        return self.answer().__await__()

    def __hash__(self) -> int:
        return id(self)


class Handle:
    def __init__(self, engine: Holder) -> None:
        self._engine = engine

    def kill(self) -> None:
        self._engine.killed = True

    def __getattr__(self, method: str) -> Any:
        engine = self._engine

        class Method:
            @staticmethod
            def remote(*args: Any) -> Ref:
                return Ref(engine, method, args)

        return Method


class FakeRay:
    """``ray.wait`` and ``ray.get`` for calls that never really wait."""

    @staticmethod
    def wait(refs: list[Ref], timeout: float) -> tuple[list[Ref], list[Ref]]:
        assert refs
        done = next((ref for ref in refs if not ref.late()), None)
        return [ref for ref in refs if ref is done], [ref for ref in refs if ref is not done]

    @staticmethod
    def get(ref: Ref, timeout: float) -> Any:
        if ref.late():
            raise GetTimeoutError
        try:
            ref.answer().send(None)
        except StopIteration as stop:
            return stop.value
        raise AssertionError("a scripted engine's transfer calls do not wait")


class Learner:
    """Sends buckets that carry the version, through the real client, as the CPU transport or as a collective does."""

    def __init__(self, handles: Sequence[Handle], collective: bool = False) -> None:
        self.handles, self.collective = handles, collective
        self.version = 0
        self.rounds: list[list[int]] = []

    async def send_weights(self, members: Sequence[int]) -> dict[int, str]:
        self.rounds.append(list(members))
        handles = {at: self.handles[at] for at in members}
        client = GeneratorClient(handles, timeout_s=1.0, collective=self.collective)
        client.init_weight_transfer_engine({})
        client.start_weight_update()
        for _ in range(BUCKETS):
            client.update_weights({"version": self.version})
        client.finish_weight_update()
        return client.failed

    async def logprobs(self, probes: Sequence[Any]) -> list[list[float]]:
        return [[-1.5, -1.0], [-1.0]]


class Run:
    def __init__(self, engines: int, collective: bool = False) -> None:
        self.engines = [Holder() for _ in range(engines)]
        handles = [Handle(engine) for engine in self.engines]
        self.fleet = Fleet(handles, CONFIG)
        self.learner: Any = Learner(handles, collective)

    async def publish(self, version: int) -> dict[str, float]:
        self.learner.version = version
        return await publish(self.fleet, self.learner, version)

    async def serving(self) -> dict[int, int]:
        """Version by index of whoever answers, each asked itself."""
        found = {}
        for at, engine in enumerate(self.engines):
            if engine.killed:
                continue
            try:
                answer = await asyncio.wait_for(engine.generate([1], SAMPLING, "probe"), 5)
                found[at] = answer.spans[0].version
            except EngineFenced:
                continue
        return found


@pytest.fixture(autouse=True)
def ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "ray", FakeRay)
    monkeypatch.setattr("ray.kill", lambda handle: handle.kill())
    monkeypatch.setattr(fleet_module, "FENCED_RETRY_S", 0.002)


@pytest.mark.parametrize("failure", [RuntimeError("out of memory"), Late(), TimeoutError("took longer than 120 s")])
@pytest.mark.parametrize("call", CALLS[:-1])
def test_one_of_two_fails_at_any_step_and_the_other_goes_on(call: str, failure: Exception) -> None:
    async def main() -> None:
        run = Run(2)
        run.engines[1].fails = {call: failure}
        metrics = await run.publish(1)
        assert metrics["publish/generators"] == 1
        assert (await run.serving())[0] == 1
        assert run.engines[0].weights == [1] * BUCKETS
        for i in range(5):
            answer = await run.fleet.generate([1], SAMPLING, key=str(i), near=str(i))
            assert answer.spans[0].version == 1
        run.engines[1].fails = {}
        assert (await run.publish(2))["publish/generators"] == 2
        assert await run.serving() == {0: 2, 1: 2}
        assert run.engines[1].weights == [2] * BUCKETS

    asyncio.run(main())


@pytest.mark.parametrize("missed", [("resume",), ("pause", "resume")])
@pytest.mark.parametrize("failure", [Late("no answer"), RuntimeError("lost")])
def test_who_does_not_say_that_it_serves_the_new_version_is_ended(failure: Exception, missed: tuple[str, ...]) -> None:
    """It may wait paused for ever, or never have paused and serve the old weights."""

    async def main() -> None:
        run = Run(2)
        run.engines[1].fails = dict.fromkeys(missed, failure)
        metrics = await run.publish(1)
        assert (metrics["publish/generators"], metrics["publish/fenced"]) == (1, 0)
        assert [engine.killed for engine in run.engines] == [False, True]
        run.engines[1].fails = {}  # would answer again, and serve version 0 if it missed the pause too
        for i in range(5):
            answer = await run.fleet.generate([1], SAMPLING, key=str(i), near=str(i))
            assert answer.spans[0].version == 1
        assert (await run.publish(2))["publish/generators"] == 1
        run.engines[0].fails = dict.fromkeys(missed, failure)
        told = "no generator holds version 3" if "pause" in missed else f"generator-0: resume failed: {failure}"
        with pytest.raises(RuntimeError, match=told):
            await run.publish(3)
        with pytest.raises(GeneratorDied, match=r"generator-0: resume failed: .*and it was ended; .*start the run"):
            await run.publish(4)

    asyncio.run(main())


@pytest.mark.parametrize("death", [ActorDiedError(), EngineDied("its engine process ended")])
@pytest.mark.parametrize("call", CALLS)
def test_one_of_two_dies_at_any_step_and_is_asked_nothing_more(call: str, death: Exception) -> None:
    async def main() -> None:
        run = Run(2)
        run.engines[1].fails = {call: death}
        assert (await run.publish(1))["publish/generators"] == 1
        run.engines[1].fails = {"": death}
        assert (await run.publish(2))["publish/generators"] == 1
        assert (await run.publish(3))["publish/generators"] == 1
        assert run.learner.rounds[-1] == [0]
        assert run.engines[0].weights == [3] * BUCKETS
        run.engines[0].fails = {"": death}
        with pytest.raises(GeneratorDied, match="all 2 generators are dead"):
            await run.publish(4)

    asyncio.run(main())


def test_a_turn_in_flight_at_who_is_fenced_goes_to_another() -> None:
    async def main() -> None:
        run = Run(2)
        run.engines[0].fails = {"generate": EngineFenced("not yet")}  # so that the turn is at the second
        await run.fleet.pause()
        turn = asyncio.create_task(run.fleet.generate([1], SAMPLING, key="a"))
        for _ in range(5):
            await asyncio.sleep(0)
        run.engines[0].fails, run.engines[1].fails = {}, {"finish_weight_update": RuntimeError("disk full")}
        await run.publish(1)
        assert (await turn).spans[0].version == 1

    asyncio.run(main())


def test_when_none_holds_the_weights_the_publish_fails_and_says_why() -> None:
    async def main() -> None:
        run = Run(2)
        for engine in run.engines:
            engine.fails = {"update_weights": RuntimeError("no space left")}
        with pytest.raises(
            RuntimeError, match=r"no generator holds version 1: .*0: .*no space left.*1: .*no space left"
        ):
            await run.publish(1)
        assert await run.serving() == {}
        with pytest.raises(GenerationFailed, match="every generator was fenced"):
            await run.fleet.generate([1], SAMPLING, key="a")
        for engine in run.engines:
            engine.fails = {}
        await run.publish(1)
        assert await run.serving() == {0: 1, 1: 1}

    asyncio.run(main())


def test_generators_that_a_failed_publish_did_not_touch_serve_the_old_version() -> None:
    async def main() -> None:
        run = Run(2)
        await run.publish(1)

        async def breaks(members: Sequence[int]) -> dict[int, str]:
            raise ConnectionError("the learner is gone")

        run.learner.send_weights = breaks
        with pytest.raises(ConnectionError):
            await run.publish(2)
        assert await run.serving() == {0: 1, 1: 1}

    asyncio.run(main())


@dataclass
class Group:
    """A communicator that knows whether it was left."""

    left: bool = False

    def broadcast(self, tensor: Any) -> None:
        raise AssertionError("a broadcast whose receivers have failed would never end")

    def destroy(self) -> None:
        self.left = True


def test_a_collective_that_one_fails_is_left_by_all() -> None:
    engines = [Holder() for _ in range(3)]
    engines[2].fails = {"update_weights": RuntimeError("no memory")}
    client = GeneratorClient({at: Handle(engines[at]) for at in (0, 2)}, timeout_s=1.0, collective=True)
    client.group = group = Group()
    client.init_weight_transfer_engine({"rank_offset": 1, "world_size": 3})
    assert [engines[at].init_info["rank_offset"] for at in (0, 2)] == [1, 2]
    client.start_weight_update()
    assert not group.left
    client.update_weights({"version": 1})
    assert group.left
    group.broadcast(None)
    assert client.failed == {0: "", 2: "update_weights failed: no memory"}


@pytest.mark.parametrize("failure", [ActorDiedError(), RuntimeError("no memory")])
@pytest.mark.parametrize("step", STEPS)
def test_a_collective_that_one_fails_is_tried_again_without_it(step: str, failure: Exception) -> None:
    async def main() -> None:
        run = Run(3, collective=True)
        run.engines[1].fails = {step: failure}
        assert (await run.publish(1))["publish/generators"] == 2
        assert run.learner.rounds == [[0, 1, 2], [0, 2]]
        assert await run.serving() == {0: 1, 2: 1}
        run.engines[1].fails = {}
        assert (await run.publish(2))["publish/generators"] == 3
        assert await run.serving() == {0: 2, 1: 2, 2: 2}

    asyncio.run(main())


faults = st.dictionaries(
    st.sampled_from(CALLS), st.sampled_from(["fails", "late", "actor dies", "engine dies"]), max_size=2
)
KINDS: dict[str, Exception] = {
    "fails": RuntimeError("fails"),
    "late": Late(),
    "actor dies": ActorDiedError(),
    "engine dies": EngineDied("its engine process ended"),
}


@settings(max_examples=100)
@given(rounds=st.lists(st.lists(faults, min_size=3, max_size=3), min_size=1, max_size=4), collective=st.booleans())
def test_no_generator_ever_serves_incomplete_or_old_weights(
    rounds: list[list[dict[str, str]]], collective: bool
) -> None:
    """After any publishes: who lives holds all of the last version that was published and answers, or is fenced."""

    async def main() -> None:
        run, last = Run(3, collective), 0
        dead: set[int] = set()
        for version, plan in enumerate(rounds, start=1):
            for at, (engine, fault) in enumerate(zip(run.engines, plan, strict=True)):
                engine.fails = {"": ActorDiedError()} if at in dead else {c: KINDS[kind] for c, kind in fault.items()}
            served = None
            try:
                served = (await run.publish(version))["publish/generators"]
                last = version
            except GeneratorDied:
                return
            except RuntimeError:  # none holds the new weights
                pass
            dead |= set(run.fleet._dead)
            answering = 0
            for at, engine in enumerate(run.engines):
                engine.fails = {}
                if at in dead:
                    continue
                try:
                    answer = await asyncio.wait_for(engine.generate([1], SAMPLING, "probe"), 5)
                except EngineFenced:
                    continue
                assert answer.spans[0].version == last
                assert engine.weights == [last] * BUCKETS
                answering += 1
            assert served in (None, answering)

    asyncio.run(main())


def test_the_mismatch_is_the_mean_divergence_and_the_gap_the_largest_difference() -> None:
    figures = logprob_gap([[-1.5, -1.0], [-1.0]], [[[-1.0, -1.0], [-1.0]]])
    assert figures["publish/logprob_gap"] == pytest.approx(0.5)
    ratio = 2.718281828459045**-0.5  # learner over engine, at the one token that differs
    assert figures["publish/kl_mismatch"] == pytest.approx((ratio - 1 - -0.5) / 3)
