"""Gymnasium's environments seen as text: the real package's FrozenLake and Taxi, and a few of our own for the rest."""

from collections.abc import Iterator
from typing import Any

import gymnasium
import pytest
from gymnasium import spaces

from asyncrl.env import EnvSpec, Trace, find_env, replay
from asyncrl.types import Task
from envs.check import check
from envs.from_gym import IGNORED, FrozenLake, GymnasiumText, Taxi
from envs.gym import AnyText, register
from envs.play import play

ACROSS = ("down", "down", "right", "right", "down", "right")
"""Over the ice of FrozenLake's four by four fields."""


class Echo(gymnasium.Env[str, str]):
    """Says back what it is told, until it is told to stop: text both ways, success in ``info``."""

    observation_space, action_space = AnyText(500), AnyText(50)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return f"say {self.np_random.integers(1000)}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        stop = action == "stop"
        return f"you said {action}", 0.5, stop, False, {"success": False} if stop else {}


class Numbers(gymnasium.Env[int, int]):
    observation_space, action_space = spaces.Discrete(3), spaces.Box(0, 1)


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    made = {"test/Echo-v0": Echo, "test/Numbers-v0": Numbers}
    for name, target in made.items():
        gymnasium.register(id=name, entry_point=target)
    yield
    for name in made:
        del gymnasium.registry[name]


@pytest.mark.parametrize(("name", "skipped"), [("FrozenLake", "replay"), ("Taxi", "snapshot")])
def test_the_real_ones_keep_the_protocol(name: str, skipped: str) -> None:
    report = check(find_env(f"envs.from_gym:{name}"))
    assert report.passed, "\n".join(report.lines())
    assert [one.name for one in report.checks if one.passed is None] == [skipped, "expert"]


def test_options_alone_make_one_that_keeps_the_protocol() -> None:
    # Slippery ice: chance is part of the state, and the seed decides it.
    options = {"id": "FrozenLake-v1", "make": {"render_mode": "ansi"}, "max_turns": 12}
    report = check(EnvSpec("lake", "envs.from_gym:GymnasiumText", options))
    assert report.passed, "\n".join(report.lines())


def test_a_person_crosses_the_lake() -> None:
    shown: list[str] = []
    typed = iter(ACROSS)
    last = play(find_env("envs.from_gym:FrozenLake"), read=lambda _: next(typed), write=shown.append)
    assert last is not None and last.reward == 1.0 and last.info == {"success": True}
    text = "\n".join(shown)
    assert "red[S]FFF" in text and "HFFred[G]" in text and "\x1b" not in text
    assert "Actions:\n  left\n  down\n" in text


def test_a_hole_is_no_success_and_the_limit_is_ours() -> None:
    lake = FrozenLake(max_turns=3)
    lake.reset(Task("lake", "0"))
    lake.step("right")
    fallen = lake.step("down")
    assert fallen[1:] == (0.0, True, False, {"success": False})
    lake.reset(Task("lake", "0"))
    assert [lake.step("up").truncated for _ in range(3)] == [False, False, True]
    with pytest.raises(RuntimeError, match="reset first"):
        lake.step("up")


def test_what_is_no_action_costs_a_turn_and_never_gets_through() -> None:
    lake = FrozenLake()
    before = lake.reset(Task("lake", "0"))
    for _ in range(2):
        step = lake.step("swim")
        assert step.observation.text == f"{IGNORED}\n{before.text}" and step.reward == 0.0
    assert lake.step("down").observation.text.startswith("  (Down)\nSFFF\nred[F]HFH")


def test_a_mask_narrows_the_actions_down() -> None:
    taxi = Taxi()
    seen = taxi.reset(Task("taxi", "3"))
    assert seen.actions == ("south", "east") == taxi.list_actions()
    assert "blue[R]" in seen.text and "yellow[ ]" in seen.text and "magenta[Y]" in seen.text
    assert taxi.step("west").observation.text.startswith(IGNORED)
    assert taxi.step("south").reward == -1.0


def test_chance_follows_the_task_so_branches_can_be_replayed() -> None:
    options = {"id": "FrozenLake-v1", "make": {"render_mode": "ansi"}, "actions": ["left", "down", "right", "up"]}
    texts = set()
    for seed in range(4):
        one, other = GymnasiumText(**options), GymnasiumText(**options)
        trace = Trace(task := Task("lake", str(seed)), one.reset(task))
        for action in ("right", "right", "up"):
            trace.add(action, one.step(action))
        assert replay(other, trace, one.list_actions()).text == trace.last.text
        texts.add(trace.last.text)
    assert len(texts) > 1


def test_text_goes_both_ways_and_info_says_what_success_is() -> None:
    echo = GymnasiumText(id="test/Echo-v0")
    seen = echo.reset(Task("echo", "7"))
    assert seen.text.startswith("say ") and seen.actions is None and seen.action_guide == "any text"
    assert echo.step("hello").observation.text == "you said hello"
    assert echo.step("x" * 51).observation.text.startswith(IGNORED)  # longer than its action space takes
    assert echo.step("stop")[1:] == (0.5, True, False, {"success": False})


def test_our_own_environments_come_back_through_gymnasium() -> None:
    register()
    pantry = GymnasiumText(id="asyncrl/Pantry-v0")
    seen = pantry.reset(Task("pantry", "5"))
    assert seen.goal != GymnasiumText.goal and seen.actions is not None and "go kitchen" in seen.actions
    assert pantry.step("go kitchen").observation.text.startswith("In the kitchen")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "set env.options.id"),
        ({"id": "NoSuch-v0"}, "cannot make id 'NoSuch-v0'"),
        ({"id": "no_such_module:Lake-v0"}, "module:Name-v0"),
        ({"id": "FrozenLake-v1"}, "render_mode: ansi"),
        ({"id": "FrozenLake-v1", "make": {"map": 4}}, "unexpected keyword argument"),
        ({"id": "FrozenLake-v1", "make": {"render_mode": "ansi"}, "actions": ["left"]}, "4 different names"),
        ({"id": "test/Numbers-v0"}, "only Text and Discrete"),
        ({"id": "FrozenLake-v1", "can_snapshot": True}, "set in a subclass"),
    ],
)
def test_what_cannot_work_is_refused_when_it_is_made(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        GymnasiumText(**options)
