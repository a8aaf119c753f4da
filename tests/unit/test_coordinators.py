"""What the driver asks of coordinators, and what it learns of episodes that were lost."""

import asyncio
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from asyncrl.evaluate.episodes import evaluate
from asyncrl.rollout.coordinator import EpisodeLost
from asyncrl.rollout.coordinators import CoordinatorDied, Coordinators
from asyncrl.rollout.summary import summarise
from asyncrl.types import Task
from tests.unit.growing import make_forest, make_turn

TASK = Task("toy", "7")


class Actor:
    """Calls of any method fail as told; what it was asked is kept."""

    def __init__(self, failure: Exception | None = None) -> None:
        self._failure = failure
        self.asked: list[tuple[Any, ...]] = []

    def __getattr__(self, method: str) -> Any:
        async def answer() -> None:
            if self._failure is not None:
                raise self._failure

        def remote(*args: Any) -> Any:
            self.asked.append((method, *args))
            return asyncio.ensure_future(answer())

        return type("Method", (), {"remote": staticmethod(remote)})


@pytest.mark.parametrize("error", [ActorDiedError(), ActorUnavailableError("out of reach", None)])
def test_a_lost_coordinator_is_ended_and_named_and_its_calls_are_given_a_groups_time_to_end(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, actor, killed = Actor(), Actor(error), []
    monkeypatch.setattr(ray, "kill", killed.append)
    coordinators = Coordinators({"coordinator-0": actor}, pool, group_timeout_s=900)

    async def main() -> None:
        with pytest.raises(CoordinatorDied, match=r"^coordinator-0 died: The actor [^\n]*[^.]$"):
            await coordinators.evaluate(TASK, -1)

    asyncio.run(main())
    assert killed == [actor]
    ((method, owner, call_s),) = pool.asked
    assert (method, owner) == ("forget", "coordinator-0")
    assert call_s >= 900, "a call may last as long as its group"


def lost(kind: str, why: str) -> Exception:
    error: Exception = RayTaskError("evaluate", "", EpisodeLost(kind, why), ip="here").as_instanceof_cause()
    return error


def test_an_evaluation_without_an_episode_names_the_commonest_causes_and_who_it_was() -> None:
    class Double:
        async def evaluate(self, task: Task, key: int) -> Any:
            if key == -1:
                raise CoordinatorDied("coordinator-1 died: no memory")
            if key == -2:
                raise TimeoutError("an episode of toy/7 took longer than 60 s")
            raise lost("generator", f"generator-0, turn {key}: out of memory")

    coordinators: Any = Double()
    told = (
        r"all 5 episodes were lost, 3 by generator, at last: generator-0, turn -5: out of memory; "
        r"1 by CoordinatorDied, at last: coordinator-1 died: no memory; 1 by TimeoutError, at last: an episode of toy/7"
    )
    with pytest.raises(RuntimeError, match=told):
        asyncio.run(evaluate(coordinators, [TASK] * 5, at_once=2))


@pytest.mark.parametrize(("room", "tokens"), [(4, 4), (100, 5), (2, 2)])
def test_a_probe_leaves_an_engine_room_for_one_token(room: int, tokens: int) -> None:
    forest = make_forest(roots=1, branch=2, leaves=1)
    turn = make_turn(terminated=True)
    forest.extend(0, turn)
    forest.finish(0, success=True)
    ids, start = summarise(forest.group(), room).probe
    assert ids == (turn.prompt_ids + turn.generation.token_ids)[:tokens]
    assert start == len(turn.prompt_ids) <= len(ids)
