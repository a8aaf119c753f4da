"""Routing and broadcast, over scripted engines that stand in for actor handles."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from asyncrl.config.engine import EngineConfig
from asyncrl.engine import fleet as module
from asyncrl.engine.base import EngineDied, EngineFenced
from asyncrl.engine.fleet import Fleet, GenerationFailed, GeneratorDied
from asyncrl.types import Sampling
from tests.scripted_engine import ScriptedEngine

SAMPLING = Sampling(temperature=1.0, max_tokens=8)
CONFIG = EngineConfig()


def one_token(prompt: Sequence[int], sampling: Sampling, key: str, version: int, source: random.Random) -> list[int]:
    return [2]


class Handle:
    """Calls methods of a local engine the way Ray calls an actor's."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self._engine = ScriptedEngine(one_token, delay=lambda source: delay_s)
        self.keys: list[str] = []
        self.failure: Exception | None = None

    def __getattr__(self, method: str) -> Any:
        call: Callable[..., Coroutine[Any, Any, Any]] = getattr(self._engine, method)

        class Method:
            @staticmethod
            async def remote(*args: Any) -> Any:
                if self.failure is not None:
                    raise self.failure
                if method == "generate":
                    self.keys.append(args[2])
                return await call(*args)

        return Method


def test_siblings_share_a_generator_and_groups_spread() -> None:
    handles = [Handle(delay_s=0.01), Handle(delay_s=0.01)]

    async def main() -> None:
        fleet = Fleet(handles, CONFIG)
        turns = [(group, leaf) for leaf in range(3) for group in range(10)]
        await asyncio.gather(
            *(fleet.generate([1], SAMPLING, key=f"{group}.{leaf}", near=str(group)) for group, leaf in turns)
        )

    asyncio.run(main())
    served = [Counter(key.split(".")[0] for key in handle.keys) for handle in handles]
    assert [len(groups) for groups in served] == [5, 5]
    assert all(count == 3 for groups in served for count in groups.values())


ACTOR_DIED = ActorDiedError()
ENGINE_DIED = RayTaskError("generate", "", EngineDied("its engine process ended (turn b)")).as_instanceof_cause()


@pytest.mark.parametrize(("death", "cause"), [(ACTOR_DIED, "The actor"), (ENGINE_DIED, "its engine process ended")])
def test_a_dead_generator_is_routed_around_until_none_is_left(death: Exception, cause: str) -> None:
    handles = [Handle(), Handle()]

    async def main() -> None:
        fleet = Fleet(handles, CONFIG)
        for i in range(10):
            await fleet.generate([1], SAMPLING, key=f"a{i}", near=str(i))
        handles[0].failure = death
        for i in range(10):
            await fleet.generate([1], SAMPLING, key=f"b{i}", near=str(i))
        assert {f"b{i}" for i in range(10)} <= set(handles[1].keys)
        handles[1].failure = death
        with pytest.raises(GenerationFailed, match=f"all 2 generators are dead; the last: generator-1 died: {cause}"):
            await fleet.generate([1], SAMPLING, key="c", near="0")

    asyncio.run(main())


def test_a_generator_that_is_out_of_reach_for_a_while_is_not_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FENCED_RETRY_S", 0.01)
    handles = [Handle(), Handle()]

    async def main() -> None:
        fleet = Fleet(handles, CONFIG)
        await fleet.generate([1], SAMPLING, key="before", near="0")
        (home,) = (handle for handle in handles if handle.keys)
        home.failure = ActorUnavailableError("the network is down", None)
        await fleet.generate([1], SAMPLING, key="meanwhile", near="0")
        assert home.keys == ["before"] and fleet.living() == [0, 1]
        home.failure = None
        await asyncio.sleep(0.02)
        for i in range(10):
            await fleet.generate([1], SAMPLING, key=f"after{i}", near=f"other{i}")
        assert len(home.keys) > 1

    asyncio.run(main())


def test_a_generator_that_does_not_answer_in_time_is_named() -> None:
    handle = Handle()
    handle.failure = TimeoutError("turn took longer than 300 s")
    with pytest.raises(GenerationFailed, match=r"generator-0, turn 7\.0\.1: turn took longer"):
        asyncio.run(Fleet([handle], CONFIG).generate([1], SAMPLING, key="7.0.1"))


def test_broadcasts_reach_all_and_counters_sum() -> None:
    async def main() -> tuple[dict[str, float], list[list[list[float]]]]:
        fleet = Fleet([Handle(), Handle(), Handle()], CONFIG)
        await fleet.start()
        assert await fleet.pause() == [0, 1, 2]
        waiting = [asyncio.create_task(fleet.generate([1, 2], SAMPLING, key=str(i))) for i in range(6)]
        await asyncio.sleep(0.01)
        assert not any(task.done() for task in waiting)
        assert await fleet.update_weight_version(5, [0, 1, 2]) == [0, 1, 2]
        await fleet.resume()
        assert fleet.fenced == []
        answers = await asyncio.gather(*waiting)
        assert {answer.spans[0].version for answer in answers} == {5}
        return await fleet.stats(), await fleet.score_everywhere([([1, 2, 3], 1), ([1, 2], 1)])

    stats, scores = asyncio.run(main())
    assert stats["requests"] == 6
    assert stats["prompt_tokens"] == 12
    assert [[len(one) for one in each] for each in scores] == [[2, 1]] * 3


LATE = TimeoutError("pause took longer than 120 s")


@pytest.mark.parametrize(("failure", "cause"), [(LATE, "pause failed: pause took longer"), (ACTOR_DIED, "died")])
def test_who_fails_a_broadcast_is_named_and_the_others_go_on(
    failure: Exception, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    handles = [Handle(), Handle()]
    handles[1].failure = failure
    assert asyncio.run(Fleet(handles, CONFIG).pause()) == [0]
    assert f"generator-1{' ' if cause == 'died' else ': '}{cause}" in caplog.text


def test_the_dead_are_asked_nothing_more_and_without_the_living_there_is_no_publish() -> None:
    handles = [Handle(), Handle()]

    async def main() -> None:
        fleet = Fleet(handles, CONFIG)
        handles[0].failure = ActorDiedError()
        assert await fleet.pause() == [1]
        handles[0].failure = None  # would answer again, if it were asked
        await fleet.resume()
        assert (fleet.living(), fleet.fenced) == ([1], [])
        assert len(await fleet.score_everywhere([([1, 2], 1)])) == 1
        handles[1].failure = ActorDiedError()
        with pytest.raises(GeneratorDied, match=r"^all 2 generators are dead; the last: generator-1 died: .*again$"):
            await fleet.pause()

    asyncio.run(main())


def test_a_start_that_fails_is_raised() -> None:
    handles = [Handle(), Handle()]
    handles[1].failure = RuntimeError("no such model")
    with pytest.raises(RuntimeError, match="generator-1: start failed: no such model"):
        asyncio.run(Fleet(handles, CONFIG).start())


FENCED = RayTaskError("generate", "", EngineFenced("the last publish did not reach it")).as_instanceof_cause()


def test_a_fenced_generator_is_routed_around_and_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FENCED_RETRY_S", 0.05)
    handles = [Handle(), Handle()]

    async def main() -> None:
        fleet = Fleet(handles, CONFIG)
        handles[0].failure = FENCED
        for i in range(10):
            await fleet.generate([1], SAMPLING, key=f"a{i}", near=str(i))
        assert {f"a{i}" for i in range(10)} <= set(handles[1].keys)
        assert len(await fleet.score_everywhere([([1, 2], 1)])) == 1
        handles[0].failure = None
        await asyncio.sleep(0.06)
        for i in range(10, 20):
            await fleet.generate([1], SAMPLING, key=f"b{i}", near=str(i))
        assert any(key.startswith("b") for key in handles[0].keys)

    asyncio.run(main())


def test_a_turn_waits_for_the_publish_that_ends_the_fence_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FENCED_RETRY_S", 0.01)
    handles = [Handle(), Handle()]

    async def main() -> None:
        fleet = Fleet(handles, CONFIG.model_copy(update={"generate_timeout_s": 0.2}))
        for handle in handles:
            handle.failure = FENCED
        turn = asyncio.create_task(fleet.generate([1], SAMPLING, key="a"))
        await asyncio.sleep(0.05)
        handles[1].failure = None
        assert (await turn).token_ids == (2,)
        handles[1].failure = FENCED
        with pytest.raises(GenerationFailed, match=r"turn b: every generator was fenced or out of reach for 0\.2 s"):
            await fleet.generate([1], SAMPLING, key="b")

    asyncio.run(main())


def test_counters_survive_a_death() -> None:
    handles = [Handle(), Handle()]

    async def main() -> tuple[dict[str, float], dict[str, float]]:
        fleet = Fleet(handles, CONFIG)
        await asyncio.gather(*(fleet.generate([1, 2], SAMPLING, key=str(i)) for i in range(6)))
        handles[0].failure = ActorDiedError()
        some = await fleet.stats()
        handles[1].failure = ActorDiedError()
        return some, await fleet.stats()

    some, none = asyncio.run(main())
    assert some["requests"] == len(handles[1].keys) == 3
    assert none == {}


def test_counters_are_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver reads them within two minutes, and fails otherwise."""
    assert module.STATS_TIMEOUT_S + module.GRACE_S <= 30
    monkeypatch.setattr(module, "STATS_TIMEOUT_S", 0.25)
    monkeypatch.setattr(module, "GRACE_S", 0.25)
    handles: list[Any] = [Handle(), Handle()]

    async def silent() -> dict[str, float]:
        await asyncio.sleep(5)
        return {}

    async def main() -> dict[str, float]:
        fleet = Fleet(handles, CONFIG)
        await asyncio.gather(*(fleet.generate([1, 2], SAMPLING, key=str(i)) for i in range(6)))
        monkeypatch.setattr(handles[0]._engine, "stats", silent)
        return await fleet.stats()

    began = time.monotonic()
    assert asyncio.run(main())["requests"] == 3
    assert time.monotonic() - began < 4
