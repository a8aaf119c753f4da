"""A person plays: what is shown, how it ends, how it is left."""

from collections.abc import Callable

import pytest

from asyncrl.env import find_env
from asyncrl.types import Task
from envs.pantry import Pantry
from envs.play import play


def _typed(*lines: str) -> Callable[[str], str]:
    queue = list(lines)

    def read(prompt: str) -> str:
        if not queue:
            raise EOFError
        return queue.pop(0)

    return read


def _solvable() -> tuple[str, list[str]]:
    env = Pantry()
    for one in Pantry.tasks("train"):
        if actions := env.expert(Task("pantry", one)):
            return one, actions
    raise AssertionError("the expert solves nothing")


def test_a_won_game_shows_task_actions_and_outcome() -> None:
    shown: list[str] = []
    task, actions = _solvable()
    last = play(find_env("pantry"), task, read=_typed(*actions), write=shown.append)
    assert last is not None and last.info["success"]
    text = "\n".join(shown)
    goal = Pantry().reset(Task("pantry", task)).goal
    assert shown[:2] == [Pantry.role, f"Task {task}: {goal}"]
    assert "Actions:\n  go kitchen\n" in text
    assert shown[-1] == f"Success after {len(actions)} turns (terminated)."


def test_a_lost_game_says_that_turns_ran_out() -> None:
    shown: list[str] = []
    last = play(find_env("pantry"), read=lambda prompt: "dance", write=shown.append)
    assert last is not None and last.truncated
    assert shown[1].startswith("Task 0: ")
    assert shown[-1] == f"No success after {Pantry.max_turns} turns (truncated: out of turns)."


def test_the_end_of_input_leaves() -> None:
    shown: list[str] = []
    last = play(find_env("pantry"), "3", read=_typed("go kitchen"), write=shown.append)
    assert last is not None and not last.done
    assert shown[-1] == "\nLeft before the end."


def test_a_long_list_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(Pantry, "_admissible", lambda self: tuple(f"push button {i}" for i in range(100)))
    play(find_env("pantry"), "3", read=_typed(), write=shown.append)
    listed = shown[-2].splitlines()
    assert listed[0] == "Actions:" and len(listed) == 22
    assert listed[-1] == "  ... and 80 more"


def test_an_unknown_task_is_refused() -> None:
    with pytest.raises(ValueError, match="task id 'x'"):
        play(find_env("pantry"), "x", read=_typed(), write=lambda text: None)
