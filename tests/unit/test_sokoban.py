"""Sokoban: the rules against a slow engine on characters, rooms and their difficulty, the solver, copies, pictures."""

import hashlib
import os
import pickle
import random
import subprocess
import sys
import warnings
from collections import deque
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config.load import load
from asyncrl.env import Trace, find_env, replay
from asyncrl.types import Task
from envs.check import check
from envs.gym import register
from envs.sokoban import MOVES, Sokoban, State
from envs.sokoban_board import Board
from envs.sokoban_picture import draw
from envs.sokoban_rooms import Shape, make_room
from envs.sokoban_solver import solve

DELTAS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
SHAPES = [Shape(), Shape(7, 7, 2, 3, 15), Shape(5, 8, 2, 2, 12)]


def task(task_id: int, seed: int = 0) -> Task:
    return Task("sokoban", str(task_id), seed)


def board(*rows: str) -> Board:
    """A board from its symbols."""
    cells = dict(enumerate("".join(rows)))

    def where(symbols: str) -> frozenset[int]:
        return frozenset(cell for cell, symbol in cells.items() if symbol in symbols)

    (player,) = where("PS")
    return Board(len(rows), len(rows[0]), where("_OX√PS"), where("O√S"), player, where("X√"))


def text_of(rows: list[list[str]]) -> str:
    return "\n".join("".join(f" {symbol} \t" for symbol in row) for row in rows)


def characters(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in row.split("\t")[:-1]] for row in text.split("\n")]


def slow_move(grid: list[list[str]], move: str) -> list[list[str]]:
    """The rule on a grid of characters, one ``if`` at a time."""
    grid = [row[:] for row in grid]
    [(r, c)] = [(r, c) for r, row in enumerate(grid) for c, symbol in enumerate(row) if symbol in "PS"]
    dr, dc = DELTAS[move]
    ahead, leave = grid[r + dr][c + dc], {"P": "_", "S": "O"}
    if ahead == "#":
        return grid
    if ahead in "X√":
        beyond = grid[r + 2 * dr][c + 2 * dc]
        if beyond not in "_O":
            return grid
        grid[r + 2 * dr][c + 2 * dc] = "√" if beyond == "O" else "X"
    grid[r + dr][c + dc] = "S" if ahead in "O√" else "P"
    grid[r][c] = leave[grid[r][c]]
    return grid


def count(grid: list[list[str]], symbols: str) -> int:
    return sum(symbol in symbols for row in grid for symbol in row)


def slow_distance(grid: list[list[str]]) -> int | None:
    """Moves of a shortest solution, by trying everything."""
    queue, seen = deque([(grid, 0)]), {str(grid)}
    while queue:
        at, moves = queue.popleft()
        if not count(at, "X"):
            return moves
        for move in DELTAS:
            to = slow_move(at, move)
            if str(to) not in seen:
                seen.add(str(to))
                queue.append((to, moves + 1))
    return None


def test_splits_are_the_papers_ranges_and_never_change() -> None:
    train, test = Sokoban.tasks("train"), Sokoban.tasks("test")
    assert (train[0], train[-1], len(train)) == ("0", "65534", 65_535)
    assert (test[0], test[-1], len(test)) == ("65536", "66535", 1_000)
    ids = hashlib.sha256("\n".join([*train, *test]).encode()).hexdigest()
    assert ids.startswith("27c8723d900f8951")
    with pytest.raises(ValueError, match="train, test"):
        Sokoban.tasks("dev")


def test_rooms_never_change() -> None:
    env = Sokoban()
    rooms = "\n\n".join(env.reset(task(i)).text for i in [*range(50), *range(65_536, 65_586)])
    assert hashlib.sha256(rooms.encode()).hexdigest().startswith("e77e57c1c28be057")


def test_a_room_is_the_same_in_every_process() -> None:
    code = (
        "from envs.sokoban_rooms import Shape, make_room\n"
        "print([list(make_room(str(i), Shape(7, 7, 2, 3, 15)).rows()) for i in range(20)])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": salt, "PYTHONIOENCODING": "utf-8"},
            capture_output=True,
            check=True,
        ).stdout
        for salt in ("1", "2")
    }
    assert len(outputs) == 1


def test_members_of_a_group_see_one_room_whatever_they_played_before() -> None:
    fresh, used = Sokoban(), Sokoban()
    random.seed(5)
    for i in range(20):
        used.reset(task(i + 1))
        used.step("up")
        assert used.reset(task(i)).same_as(fresh.reset(task(i)))


def test_the_seed_makes_another_room_of_the_same_id() -> None:
    assert len({Sokoban().reset(task(5, seed)).text for seed in range(10)}) == 10


@pytest.mark.parametrize("bad", ["4294967295", "-1", "x", "", "1.5", "²", "٣", "9" * 5000])
def test_an_unknown_task_is_refused(bad: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - int() itself refuses the longest
        Sokoban().reset(Task("sokoban", bad))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"mode": "rgb_array"}, "mode"),
        ({"height": 3}, "height"),
        ({"width": 21}, "width"),
        ({"boxes": 0}, "boxes"),
        ({"boxes": 5}, "boxes"),
        ({"min_moves": 0}, "min_moves"),
        ({"min_moves": 9}, "min_moves"),
        ({"max_turns": 7}, "max_turns"),
        ({"height": 4, "width": 4, "min_moves": 30, "max_moves": 30, "max_turns": 30}, "no room found"),
    ],
)
def test_a_bad_option_is_refused(options: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Sokoban(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("held_out", [False, True])
def test_a_room_is_walled_in_and_as_hard_as_asked(shape: Shape, held_out: bool) -> None:
    lengths = set()
    for i in range(25):
        room = make_room(str(i), shape, held_out)
        grid = list(room.rows())
        assert (len(grid), len(grid[0])) == (shape.height, shape.width)
        assert {*grid[0], *grid[-1], *(row[0] for row in grid), *(row[-1] for row in grid)} == {"#"}
        assert (count(grid, "X"), count(grid, "O"), count(grid, "P")) == (shape.boxes, shape.boxes, 1)
        moves = slow_distance(grid)
        assert moves is not None and shape.min_moves <= moves <= shape.max_moves
        assert len(solve(room) or ()) == moves
        lengths.add(moves)
    assert len(lengths) >= 5


def test_no_layout_is_in_both_splits() -> None:
    def layouts(ids: range, held_out: bool) -> set[tuple[frozenset[int], frozenset[int]]]:
        rooms = [make_room(str(i), Shape(4, 6), held_out) for i in ids]
        return {(room.floor, room.targets) for room in rooms}

    train, test = layouts(range(300), False), layouts(range(300), True)
    assert len(train) > 20 and len(test) > 5  # so few exist in rooms this small that splits drawn freely would overlap
    assert not train & test


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32 - 2),
    st.sampled_from(SHAPES),
    st.lists(st.sampled_from([*MOVES, " UP ", "still", "", "push up"]), max_size=60),
)
def test_every_step_agrees_with_the_slow_engine(task_id: int, shape: Shape, actions: list[str]) -> None:
    env = Sokoban("text", *shape, max_turns=60)
    grid = characters(env.reset(task(task_id)).text)
    for turn, action in enumerate(actions, start=1):
        known = action.strip().lower()
        after = slow_move(grid, known) if known in DELTAS else grid
        solved = not count(after, "X")
        reward = -0.1 + count(after, "√") - count(grid, "√") + 10 * solved
        step = env.step(action)
        assert step.observation.text == text_of(after)
        assert step.reward == pytest.approx(reward)
        assert (step.terminated, step.truncated) == (solved, not solved and turn == 60)
        grid = after
        if step.done:
            assert step.info == {"success": solved} and step.observation.actions == ()
            break
        assert step.info == {} and step.observation.actions == MOVES


def rewards(start: Board, *actions: str) -> list[float]:
    env = Sokoban()
    env.restore(State(start))
    return [round(env.step(action).reward, 6) for action in actions]


def test_rewards_by_hand() -> None:
    two = board("########", "#PXO___#", "#____XO#", "########")
    assert rewards(two, "right") == [0.9]
    assert rewards(two, "right", "right") == [0.9, -1.1]
    assert rewards(two, "right", "down", *["right"] * 3) == [0.9, -0.1, -0.1, -0.1, 10.9]
    assert rewards(two, "up", "left", "jump", "") == [-0.1] * 4
    pair = board("#######", "#P√O__#", "#__X__#", "#######")
    assert rewards(pair, "right") == [-0.1]  # from one target to the next
    blocked = board("#######", "#PXX_O#", "#___O_#", "#######")
    assert rewards(blocked, "right", "right") == [-0.1, -0.1]


def test_an_episode_ends_after_fifteen_turns_the_invalid_ones_included() -> None:
    env = Sokoban()
    env.reset(task(0))
    steps = [env.step("dance") for _ in range(15)]
    assert [step.truncated for step in steps] == [False] * 14 + [True]
    assert not any(step.terminated for step in steps)
    assert env.step("up").reward == 0 and env.step("up").done


def test_the_solver_knows_when_there_is_nothing_to_do_and_when_there_is_no_way() -> None:
    assert solve(board("#####", "#P√_#", "#####")) == []
    assert solve(board("#####", "#X_P#", "#__O#", "#####")) is None  # in a corner
    assert solve(board("######", "#PX_O#", "######")) == ["right", "right"]
    assert solve(board("#######", "#P_XXO#", "#____O#", "#######")) is None  # two side by side on a wall
    hard = make_room("0", Shape(9, 9, 3, 12, 30))
    assert solve(hard, max_nodes=3) is None
    assert solve(hard) is not None


def test_the_expert_solves_two_hundred_rooms_and_chance_does_not() -> None:
    env, rng, solved, lucky = Sokoban(), random.Random(0), 0, 0
    for i in range(65_536, 65_736):
        moves = env.expert(task(i))
        assert moves is not None and env.snapshot().turns == 0
        solved += [env.step(move) for move in moves][-1].info["success"]
        env.reset(task(i))
        while not (step := env.step(rng.choice(MOVES))).done:
            pass
        lucky += step.info["success"]
    assert solved == 200
    assert 20 < lucky < 100


def test_the_expert_goes_on_from_anywhere_until_a_box_is_stuck() -> None:
    rng, env, recovered, stuck = random.Random(1), Sokoban(), 0, 0
    for i in range(100):
        env.reset(task(i))
        for _ in range(5):
            env.step(rng.choice(MOVES))
        if env.snapshot().done:
            assert env.expert_action() is None
            continue
        moves = 0
        while (move := env.expert_action()) is not None:
            moves += 1
            env.step(move)
        success = env.snapshot().board.solved
        assert success or moves in (0, 10)
        recovered, stuck = recovered + success, stuck + (moves == 0)
    assert recovered > 30 and stuck > 5


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 66_535),
    *[st.lists(st.sampled_from(MOVES), max_size=8)] * 3,
    st.sampled_from(["text", "image"]),
)
def test_a_copy_has_the_same_future(task_id: int, stem: list[str], other: list[str], on: list[str], mode: str) -> None:
    env, copy = Sokoban(mode), Sokoban(mode)  # type: ignore[arg-type]
    seen = env.reset(task(task_id))
    for action in stem:
        seen = env.step(action).observation
    kept = pickle.dumps(env.snapshot())
    future = [env.step(action) for action in on]
    for target in (copy, env):
        for action in other:
            target.step(action)
        assert target.restore(pickle.loads(kept)).same_as(seen)
        for action, expected in zip(on, future, strict=True):
            step = target.step(action)
            assert step.observation.same_as(expected.observation) and step[1:] == expected[1:]


def test_two_hundred_random_prefixes_replay_exactly() -> None:
    rng, env, other = random.Random(2), Sokoban(), Sokoban()
    for i in range(200):
        chosen = task(rng.randrange(2**32 - 1), i % 3)
        trace = Trace(chosen, env.reset(chosen))
        for _ in range(rng.randrange(16)):
            if trace.steps and trace.steps[-1].done:
                break
            action = rng.choice([*MOVES, "sing"])
            trace.add(action, env.step(action))
        assert replay(other, trace, env.list_actions()).same_as(trace.last)


def test_a_picture_shows_every_cell_and_the_words_give_nothing_away() -> None:
    env, text = Sokoban("image"), Sokoban()
    symbols: dict[str, set[bytes]] = {}
    words = set()
    for i in range(50):
        seen, grid = env.reset(task(i)), text.reset(task(i)).text
        for move in ("up", "left", "left", "down", "right", "right"):
            assert seen.image is not None and seen.image.shape == env.image_shape == (96, 96, 3)
            assert seen.image.dtype == np.uint8
            assert seen.anchor == grid
            words.add(seen.text)
            for r, row in enumerate(characters(grid)):
                for c, symbol in enumerate(row):
                    tile = seen.image[16 * r : 16 * r + 16, 16 * c : 16 * c + 16]
                    symbols.setdefault(symbol, set()).add(tile.tobytes())
            seen, grid = env.step(move).observation, text.step(move).observation.text
    assert len(words) == 1
    assert all(len(tiles) == 1 for tiles in symbols.values())  # one look a symbol,
    assert len(set.union(*symbols.values())) == len(symbols) == 7  # and seven different ones


def test_a_picture_is_as_wide_as_the_room() -> None:
    assert draw(board("#####", "#PXO#", "#####")).shape == (48, 80, 3)
    assert Sokoban("image", height=5, width=7).image_shape == (80, 112, 3)
    assert Sokoban().image_shape is None


@pytest.mark.parametrize("options", [{}, {"mode": "image", "height": 7, "width": 8, "boxes": 2}])
def test_it_keeps_the_protocol(options: dict[str, object]) -> None:
    report = check(find_env("sokoban", options))
    assert report.passed, "\n".join(report.lines())
    assert report.figures["expert_success"] == 1


@pytest.mark.parametrize("mode", ["text", "image"])
def test_gymnasiums_checker_has_nothing_to_say(mode: str) -> None:
    register()
    env = gymnasium.make("asyncrl/Sokoban-v0", mode=mode)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env.unwrapped)
    seen, _ = env.reset(options={"task_id": "7"})
    assert set(seen) == {"goal", "text"} | ({"image"} if mode == "image" else set())


def test_the_recipe_is_sparks() -> None:
    config = load(Path(__file__).parents[2] / "configs" / "sokoban_spark.yaml")
    assert (config.tree.roots, config.tree.branch, config.tree.leaves, config.tree.criterion) == (4, 2, 8, "explore")
    assert (config.runtime.groups_per_batch, config.runtime.versions, config.learner.lr) == (16, 120, 1e-6)
    assert (config.prompt.max_prompt_tokens, config.sampling.max_tokens) == (1024, 512)
    env = find_env(config.env.name, config.env.options).make()
    assert isinstance(env, Sokoban) and env.max_turns == 15
