"""How long environments with latency take, and that the others take no longer than they do."""

import math
from statistics import median, stdev

import pytest

from asyncrl.config.env import EnvConfig, LatencyConfig
from asyncrl.env import Trace
from asyncrl.rollout.env_worker import EnvWorker
from asyncrl.runtime.system import slot_spec
from asyncrl.types import Task
from envs.delayed import LONGEST_S
from tests.unit.moody import MOODY, TASK


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    seconds: list[float] = []
    monkeypatch.setattr("envs.delayed.time.sleep", seconds.append)
    return seconds


def slow(median_s: float = 0.3, sigma: float = 1.2) -> EnvWorker:
    latency = LatencyConfig(median_s=median_s, sigma=sigma)
    return EnvWorker(slot_spec(EnvConfig(name=MOODY.target, latency=latency)), 2)


def test_latency_depends_on_the_task_and_the_actions_alone(slept: list[float]) -> None:
    trace = Trace(TASK, slow().call(0, "reset", TASK))
    one, other = slow(), slow()
    slept.clear()
    one.call(0, "reset", TASK)
    for action in "ab":
        trace.add(action, one.call(0, "step", action))
    snapshot = one.call(0, "snapshot")
    one.call(0, "step", "c")
    played, slept[:] = slept[:], []
    assert len(set(played)) == 4
    other.call(1, "replay", trace, None)  # a replay takes as long as the episode did
    other.call(1, "step", "c")
    assert slept == played
    slept.clear()
    other.call(0, "restore", snapshot)
    other.call(0, "step", "c")
    assert slept == played[3:]
    slept.clear()
    other.call(0, "reset", Task("moody", "0", seed=1))
    other.call(0, "reset", Task("moody", "1"))
    one.call(1, "reset", TASK)
    one.call(1, "step", "b")
    assert not set(slept) & set(played[1:]) and slept[2] == played[0]


def test_latency_is_log_normal_and_stays_below_a_step_s_time_limit(slept: list[float]) -> None:
    worker = slow()
    for number in range(4000):
        worker.call(0, "reset", Task("moody", str(number)))
    logs = [math.log(seconds) for seconds in slept]
    assert abs(median(logs) - math.log(0.3)) < 0.06  # three standard errors: 1.2 * 1.25 / sqrt(4000) each
    assert abs(stdev(logs) - 1.2) < 0.04
    slow(median_s=1e4, sigma=0).call(0, "reset", TASK)
    assert slept[-1] == LONGEST_S


def test_an_environment_without_latency_sleeps_not_and_is_not_wrapped(slept: list[float]) -> None:
    worker = EnvWorker(slot_spec(EnvConfig(name=MOODY.target)), 1)
    worker.call(0, "reset", TASK)
    worker.call(0, "step", "a")
    assert slept == [] and worker.call(0, "snapshot") == "a"
    assert slow().call(0, "list_actions") is None
