"""Environments of the package ``verifiers`` as ours: the package's own rollout, driven turn by turn."""

import signal
from pathlib import Path

import pytest

pytest.importorskip("verifiers.envs.environment", reason="needs the package verifiers: pip install 'verifiers<0.4'")

from asyncrl.env import Env, Trace, find_env, replay
from asyncrl.types import Task
from envs.check import check

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def _make(name: str) -> Env:
    return find_env(f"verifiers_sample:{name}").make()


def test_it_keeps_the_protocol() -> None:
    report = check(find_env("verifiers_sample:Guessing"))
    assert report.passed, "\n".join(report.lines())
    assert [one.name for one in report.checks if one.passed is None] == ["snapshot", "expert"]


def test_a_game_is_won_and_scored_by_the_rubric() -> None:
    env = _make("Guessing")
    first = env.reset(Task("guessing", "train/17"))
    assert first.goal == "I think of a number below ten.\n\nGame 17" and first.text == "Begin."
    assert env.step("3").observation.text == "Higher."
    assert env.step("many").observation.text == "That is no number."
    last = env.step("7")
    assert last[1:] == (1.0, True, False, {"success": True}) and last.observation.text == "That is it."
    with pytest.raises(RuntimeError, match="reset first"):
        env.step("7")


def test_its_own_limit_truncates() -> None:
    env = _make("Guessing")
    env.reset(Task("guessing", "test/3"))
    steps = [env.step("9") for _ in range(env.max_turns)]
    assert [step.done for step in steps] == [False] * 4 + [True]
    assert steps[-1][1:] == (0.0, False, True, {"success": False})


def test_a_branch_is_replayed_and_both_go_on() -> None:
    parent, child = _make("Guessing"), _make("Guessing")
    trace = Trace(task := Task("guessing", "train/4"), parent.reset(task))
    trace.add("9", parent.step("9"))
    assert replay(child, trace).text == "Lower."
    assert parent.step("1").observation.text == "Higher."
    assert child.step("4").reward == 1.0
    assert parent.step("4").reward == 1.0


def test_rows_are_kept_back_where_there_is_no_evaluation_set() -> None:
    env = _make("WithoutEvaluation")
    assert (len(env.tasks("train")), list(env.tasks("test"))) == (36, [f"test/{i}" for i in range(36, 40)])
    assert env.reset(Task("guessing", "test/38")).goal.endswith("Game 38")


def test_a_failure_is_no_score_and_no_wait_is_endless() -> None:
    failing, stuck = _make("Failing"), _make("Stuck")
    failing.reset(Task("guessing", "train/1"))
    with pytest.raises(RuntimeError, match="the server is gone"):
        failing.step("5")
    stuck.reset(Task("guessing", "train/1"))
    with pytest.raises(TimeoutError, match=r"timeout_s = 0\.2"):
        stuck.step("5")


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="calls tools"):
        _make("Tools")
    with pytest.raises(NotImplementedError, match=r"write load\(\)"):
        find_env("envs.from_verifiers:VerifiersText").make()
    with pytest.raises(ValueError, match="no task 'train/99'"):
        _make("Guessing").reset(Task("guessing", "train/99"))


def test_signals_stay_the_processs_own() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    _make("Guessing")
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
