"""Verified replay, the registry, and errors that travel between processes."""

import pickle
from collections.abc import Callable

import pytest

from asyncrl.env import Env, EnvSpec, ReplayMismatch, Trace, find_env, replay
from asyncrl.types import Observation, Step, Task
from envs.pantry import Pantry

TASK = Task("pantry", "5")


def _trace(steps: int = 4) -> tuple[Trace, tuple[str, ...]]:
    env = Pantry()
    trace = Trace(TASK, env.reset(TASK))
    for _ in range(steps):
        action = env.list_actions()[0]
        trace.add(action, env.step(action))
    return trace, env.list_actions()


class Drifting(Pantry):
    """Pantry whose ``at``-th step (0: the reset) is changed on the way out, whenever it is played."""

    def __init__(self, at: int, change: Callable[[Step], Step]) -> None:
        super().__init__()
        self.at, self.change, self.count = at, change, 0

    def reset(self, task: Task) -> Observation:
        self.count, seen = 0, super().reset(task)
        return self.change(Step(seen, 0.0, False, False, {})).observation if self.at == 0 else seen

    def step(self, action: str) -> Step:
        self.count += 1
        step = super().step(action)
        return self.change(step) if self.count == self.at else step


def _blurred(step: Step) -> Step:
    return step._replace(observation=Observation("fog", step.observation.goal, step.observation.actions))


def _other_goal(step: Step) -> Step:
    return step._replace(observation=Observation(step.observation.text, "another", step.observation.actions))


def _fewer_actions(step: Step) -> Step:
    seen = step.observation
    return step._replace(observation=Observation(seen.text, seen.goal, (seen.actions or ())[1:]))


def test_replay_of_a_deterministic_environment_ends_where_the_trace_ends() -> None:
    trace, actions = _trace()
    env = Pantry()
    assert replay(env, trace, actions).same_as(trace.last)
    assert env.list_actions() == actions


@pytest.mark.parametrize(
    ("at", "change", "what"),
    [
        (0, _blurred, "observation"),
        (2, _blurred, "observation"),
        (4, _other_goal, "observation"),
        (3, _fewer_actions, "observation"),
        (1, lambda step: step._replace(reward=0.5), "reward"),
        (4, lambda step: step._replace(terminated=True), "end flags"),
        (2, lambda step: step._replace(truncated=True), "end flags"),
    ],
)
def test_replay_refuses_a_step_that_differs(at: int, change: Callable[[Step], Step], what: str) -> None:
    trace, actions = _trace()
    with pytest.raises(ReplayMismatch) as caught:
        replay(Drifting(at, change), trace, actions)
    assert (caught.value.step, caught.value.what) == (at, what)
    assert f"pantry task 5 diverged at step {at} in {what}" in str(caught.value)


def test_replay_refuses_other_actions_at_the_fork() -> None:
    trace, actions = _trace()
    with pytest.raises(ReplayMismatch, match="admissible actions") as caught:
        replay(Pantry(), trace, actions[:-1])
    assert caught.value.step == 4


def test_replay_accepts_what_the_parent_could_not_list() -> None:
    trace, _ = _trace()
    assert replay(Pantry(), trace, None).same_as(trace.last)


def test_a_mismatch_survives_pickling() -> None:
    error = ReplayMismatch(TASK, 3, "reward", 0.0, 1.0)
    back = pickle.loads(pickle.dumps(error))
    assert (type(back), str(back), back.step, back.what) == (ReplayMismatch, str(error), 3, "reward")


def test_a_copied_trace_grows_alone() -> None:
    trace, _ = _trace(2)
    copy = trace.copy()
    copy.add("go study", trace.steps[0])
    assert (len(trace.actions), len(trace.steps)) == (2, 2)
    assert Trace(TASK, trace.first).last is trace.first


def test_observations_differ_in_anything_the_agent_sees() -> None:
    seen = Observation("here", "there", ("go",), action_guide="go OBJ")
    assert seen.same_as(Observation("here", "there", None, action_guide="go OBJ"))
    for other in (
        Observation("Here", "there", ("go",), action_guide="go OBJ"),
        Observation("here", "There", ("go",), action_guide="go OBJ"),
        Observation("here", "there", ("stay",), action_guide="go OBJ"),
        Observation("here", "there", ("go",), action_guide="stay"),
    ):
        assert not seen.same_as(other)


def test_the_registry_finds_short_names_and_targets() -> None:
    assert isinstance(find_env("pantry").make(), Pantry)
    assert find_env("envs.pantry:Pantry").env_class() is Pantry


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda: find_env("pantri"), "'pantri' is not registered; known: .*pantry, "),
        (lambda: find_env("no_such_module:Env").env_class(), "cannot load 'no_such_module:Env'"),
        (lambda: find_env("envs.pantry:Larder").env_class(), "cannot load 'envs.pantry:Larder'"),
        (lambda: find_env("envs.pantry:House").env_class(), "not a subclass of asyncrl.env.Env"),
    ],
)
def test_a_wrong_name_is_refused(act: Callable[[], object], says: str) -> None:
    with pytest.raises(ValueError, match=says.replace("(", r"\(")):
        act()


def test_a_spec_travels_with_its_options() -> None:
    spec = pickle.loads(pickle.dumps(EnvSpec("pantry", "envs.pantry:Pantry", {})))
    assert isinstance(spec.make(), Pantry)


def test_an_environment_without_copies_says_so() -> None:
    env = Pantry()
    with pytest.raises(TypeError, match="Pantry cannot copy itself; branch it by replay"):
        Env.snapshot(env)
    with pytest.raises(TypeError, match="branch it by replay"):
        Env.restore(env, None)
