"""ScienceWorld on the real simulator: gold paths, exact branches, independence of history, no process left behind."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import gymnasium
import pytest

from asyncrl.env import EnvSpec, ReplayMismatch, Trace, replay
from asyncrl.types import Task
from envs.check import check
from envs.gym import register
from envs.scienceworld import LISTING_SEED, ScienceWorld
from envs.scienceworld_gold import play
from envs.scienceworld_host import SimulatorLost, java_home, simulator_jar
from envs.scienceworld_jvm import Jvm
from envs.scienceworld_splits import VARIATIONS

pytestmark = pytest.mark.integration

VARIED = ("find-animal/0", "power-component/1", "chemistry-mix/2", "grow-plant/1", "boil/3")


def _task(task_id: str) -> Task:
    return Task("scienceworld", task_id)


@pytest.fixture(scope="module")
def env() -> Iterator[ScienceWorld]:
    made = ScienceWorld(max_turns=100)
    yield made
    made.close()


@pytest.fixture(scope="module")
def other() -> Iterator[ScienceWorld]:
    """A second slot, in a JVM of its own."""
    made = ScienceWorld(max_turns=100)
    yield made
    made.close()


def _wander(env: ScienceWorld, task: Task, turns: int) -> Trace:
    """Random valid actions, none that may end the episode early."""
    trace, rng = Trace(task, env.reset(task)), random.Random(task.id)
    for _ in range(turns):
        action = rng.choice([one for one in env.list_actions() if not one.startswith("focus")])
        trace.add(action, env.step(action))
    return trace


@pytest.fixture(scope="module")
def jvm() -> Iterator[Jvm]:
    """The simulator without the adapter."""
    made = Jvm(java_home(), simulator_jar())
    yield made
    made.close()


def test_the_table_of_tasks_is_the_simulators(jvm: Jvm) -> None:
    names = jvm.call_list("getTaskNames")
    assert {name: jvm.call("getTaskMaxVariations", name) for name in names} == VARIATIONS
    assert names == list(VARIATIONS)


@pytest.mark.parametrize(
    "task_id",
    [
        "find-animal/0",
        "power-component/1",
        "chemistry-mix/2",
        "lifespan-longest-lived/4",
        "boil/3",
        "use-thermometer/2",
    ],
)
def test_a_gold_path_scores_100(env: ScienceWorld, task_id: str) -> None:
    task = _task(task_id)
    gold = env.expert(task)
    assert gold is not None
    steps = [env.step(action) for action in gold]  # the expert leaves the environment reset
    assert [step.done for step in steps] == [False] * (len(gold) - 1) + [True]
    assert steps[-1].terminated and not steps[-1].truncated
    assert steps[-1].info["score"] == 100 and steps[-1].info["success"] and steps[-1].info["spark_success"]
    assert [step.reward for step in steps] == [0.0] * (len(gold) - 1) + [1.0]


def test_a_gold_path_longer_than_the_limit_is_no_expert() -> None:
    short = ScienceWorld(max_turns=9)
    try:
        assert short.expert(_task("find-animal/0")) is None
        assert short.expert(_task("lifespan-longest-lived/0")) is not None
    finally:
        short.close()


def test_gold_paths_are_played_whole_or_as_far_as_the_moves_go(monkeypatch: pytest.MonkeyPatch) -> None:
    (whole,) = play(["find-animal/0"])
    assert whole.fits and whole.score == 100 and 5 < whole.moves <= whole.actions < 30
    for module in ("scienceworld", "scienceworld_gold"):
        monkeypatch.setattr(f"envs.{module}.MOVE_LIMIT", 5)
    (cut,) = play(["find-animal/0"])
    assert not cut.fits and cut.score < 100 and (cut.actions, cut.moves) == (whole.actions, 6)


def test_a_branch_is_exact_in_another_jvm(env: ScienceWorld, other: ScienceWorld) -> None:
    """Replay is verified at every step and by the valid actions at the fork; then both go on alike."""
    for task_id in VARIED:
        trace = _wander(env, _task(task_id), 12)
        actions = env.list_actions()
        assert len(actions) > 50 and list(actions) == sorted(set(actions))
        assert replay(other, trace, actions).same_as(trace.last)
        onward = actions[len(actions) // 2]
        one, two = env.step(onward), other.step(onward)
        assert one.observation.same_as(two.observation) and one[1:] == two[1:]


def test_listing_actions_changes_nothing(env: ScienceWorld) -> None:
    """Names of objects are drawn at random by the simulator: paints in cups have many."""
    trace = _wander(env, _task("power-component/1"), 8)  # lists before every step
    actions = env.list_actions()
    assert env.list_actions() == actions
    assert replay(env, trace).same_as(trace.last)  # lists nowhere
    assert env.list_actions() == actions


def test_a_branch_of_another_episode_is_refused(env: ScienceWorld) -> None:
    trace = _wander(env, _task("find-animal/0"), 4)
    trace.task = _task("find-animal/1")
    with pytest.raises(ReplayMismatch):
        replay(env, trace)


def test_loading_gives_the_state_that_the_packages_reset_gives(env: ScienceWorld, jvm: Jvm) -> None:
    for task_id in ("grow-plant/1", "melt/2", "inclined-plane-determine-angle/3"):
        trace = _wander(env, _task(task_id), 6)
        name, variation = task_id.split("/")
        jvm.call("load", name, int(variation), "easy", False)
        jvm.call("reset")
        assert jvm.call("step", "look around") == trace.first.text
        assert [jvm.call("step", action) for action in trace.actions] == [s.observation.text for s in trace.steps]
        jvm.seed(LISTING_SEED)
        assert tuple(sorted(set(jvm.call_list("getValidActionObjectCombinations")))) == env.list_actions()


def test_a_group_plays_one_task(env: ScienceWorld, other: ScienceWorld) -> None:
    """Eight resets over two JVMs, other episodes between them, begin alike; another variation does not."""
    task = _task("find-non-living-thing/5")
    firsts = []
    for slot in (env, other) * 4:
        slot.reset(_task("boil/0"))
        slot.step("go to kitchen")
        firsts.append(slot.reset(task))
    assert all(first.same_as(firsts[0]) for first in firsts)
    assert not env.reset(_task("find-non-living-thing/6")).same_as(firsts[0])


def test_a_wrong_focus_ends_the_episode_without_reward(env: ScienceWorld) -> None:
    env.reset(_task("boil/3"))
    env.step("go to kitchen")
    step = env.step("focus on stove")
    assert step.terminated and not step.truncated and step.reward == 0.0
    assert step.info["score"] == -100 and not step.info["success"] and not step.info["spark_success"]
    with pytest.raises(RuntimeError, match="call reset first"):
        env.step("look around")


def test_turns_and_moves_are_limited() -> None:
    env = ScienceWorld(max_turns=12)
    try:
        env.reset(_task("boil/3"))
        steps = [env.step("look around") for _ in range(12)]
        assert [step.truncated for step in steps] == [False] * 11 + [True]
        assert steps[-1].info == {"score": 0, "moves": 0, "success": False, "spark_success": False}
        env.reset(_task("boil/3"))
        turns = 0
        while not (step := env.step("wait")).done:  # ten moves and more each
            turns += 1
        assert step.truncated and not step.terminated and step.info["moves"] > 100 and turns < 11
    finally:
        env.close()


def test_the_action_guide_names_templates_and_objects_in_reach(other: ScienceWorld) -> None:
    guided = ScienceWorld(action_guide=True)
    try:
        first = guided.reset(_task("boil/3"))
        templates, objects = first.action_guide.split("\n")
        assert "move OBJ to OBJ" in templates and "teleport OBJ" in templates
        assert objects.startswith("OBJ is one of: agent, air, axe, ") and first.actions is None
        moved = guided.step("go to kitchen").observation
        assert "stove" in moved.action_guide and "axe" not in moved.action_guide
        assert len(moved.action_guide) < 1000
        assert other.reset(_task("boil/3")).action_guide == ""
    finally:
        guided.close()


def test_the_conformance_checker_passes() -> None:
    spec = EnvSpec("scienceworld", "envs.scienceworld:ScienceWorld", {"max_turns": 6})
    report = check(spec, split="test", tasks=1)
    assert report.passed, "\n".join(report.lines())
    assert next(one.passed for one in report.checks if one.name == "replay")


def test_gymnasium_makes_it() -> None:
    register()
    made = gymnasium.make("asyncrl/ScienceWorld-v0", max_turns=3, split="L2_test")
    try:
        seen, info = made.reset(seed=1)
        assert info["task_id"] in ScienceWorld.tasks("L2_test") and seen in made.observation_space
        assert [made.step("look around")[3] for _ in range(3)] == [False, False, True]
    finally:
        made.close()


def test_a_lost_jvm_is_reported_and_replaced_and_close_ends_it() -> None:
    before = set(_children(os.getpid()))
    env = ScienceWorld()
    try:
        first = env.reset(_task("boil/3"))
        (jvm,) = set(_children(os.getpid())) - before
        os.kill(jvm, signal.SIGKILL)
        with pytest.raises(SimulatorLost, match=rf"pid {jvm}\) was lost"):
            env.step("look around")
        assert not _alive(jvm)
        assert env.reset(_task("boil/3")).same_as(first)
        (jvm,) = set(_children(os.getpid())) - before
    finally:
        env.close()
    env.close()
    assert not _alive(jvm)


def test_a_jvm_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-Xmx1k")
    env = ScienceWorld()
    with pytest.raises(SimulatorLost, match=r"did not start.*exit code 1.*Too small maximum heap"):
        env.reset(_task("boil/3"))


def test_the_jvm_dies_with_a_killed_process() -> None:
    code = (
        "import sys, time\n"
        "from envs.scienceworld import ScienceWorld\n"
        "from asyncrl.types import Task\n"
        "env = ScienceWorld()\n"
        "env.reset(Task('scienceworld', 'boil/3'))\n"
        "print('ready', flush=True)\n"
        "time.sleep(120)\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "ready\n"
        (jvm,) = _children(holder.pid)
    finally:
        holder.kill()
        holder.wait(10)
    deadline = time.monotonic() + 20
    while _alive(jvm) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(jvm)


def _children(parent: int) -> list[int]:
    """Pids of the Java processes started by ``parent``."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat, command = (folder / "stat").read_text(), (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if int(stat.rpartition(")")[2].split()[1]) == parent and b"py4j.GatewayServer" in command:
            found.append(int(folder.name))
    return found


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
