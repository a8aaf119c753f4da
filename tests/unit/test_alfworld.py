"""ALFWorld on games of our own: rules, texts, splits, faults in the data. Integration compares the original engine."""

import hashlib
import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.env import EnvSpec, find_env
from asyncrl.types import Task
from envs.alfworld import tasks, world
from envs.alfworld.env import ALFWorld
from envs.alfworld.game import Game, State, bits, compile_game, load_game, members
from envs.check import check
from tests.unit import alfworld_sample as sample


def _game(name: str = "put") -> Game:
    goal, task, walkthrough = sample.GAMES[name]
    return compile_game(sample.problem(goal), task, "Say it.", walkthrough)


def _play(game: Game, *commands: str) -> tuple[State, list[str]]:
    """The state after these commands, all admissible, and what was answered."""
    state, answers = game.first, []
    for command in commands:
        move = world.moves(game, state)[command]
        state = world.apply(game, state, move)
        answers.append(world.describe(game, state, move))
    return state, answers


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sample.write_games(tmp_path_factory.mktemp("alfworld") / "games")


def _env(games: Path, **options: object) -> ALFWorld:
    return sample.SampleHouses(data=str(games), **options)  # type: ignore[arg-type]


def test_an_episode_reads_like_the_original() -> None:
    game = _game()
    assert world.welcome(game) == (
        "-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room. Looking quickly around you, you see "
        "a cabinet 2, a cabinet 1, a desk 1, a fridge 1, a microwave 1, a shelf 1, and a sinkbasin 1.\n\n"
        "Your task is to: put a key in cabinet."
    )
    commands, answers = zip(*sample.SCRIPT, strict=True)
    assert _play(game, *commands)[1] == list(answers)
    assert _play(game, "help")[1] == ["Say it."]


@pytest.mark.parametrize(
    ("treatments", "words"),
    [
        ((), "There's nothing special about apple 1."),
        (("cool",), "This is a cold apple 1."),
        (("heat",), "This is a hot apple 1."),
        (("clean",), "This is a clean apple 1."),
        (("clean", "cool"), "This is a cool and clean apple 1."),
        (("cool", "clean", "heat"), "This is a hot and clean apple 1."),
        (("heat", "cool"), "This is a cold apple 1."),
    ],
)
def test_treatments_add_up_and_heat_undoes_cold(treatments: tuple[str, ...], words: str) -> None:
    places = {"heat": "microwave 1", "cool": "fridge 1", "clean": "sinkbasin 1"}
    commands = ["go to shelf 1", "take apple 1 from shelf 1"]
    for one in treatments:
        commands += [f"go to {places[one]}", f"{one} apple 1 with {places[one]}"]
    assert _play(_game(), *commands, "examine apple 1")[1][-1] == words


def test_what_is_admissible() -> None:
    game = _game()
    everywhere = {"help", "inventory", "look"}
    roads = {f"go to {name}" for name in game.receptacles}
    assert set(world.moves(game, game.first)) == everywhere | roads
    state, _ = _play(game, "go to cabinet 2")
    assert set(world.moves(game, state)) == everywhere | (roads - {"go to cabinet 2", "go to shelf 1"}) | {
        "open cabinet 2",
        "examine cabinet 2",
        "examine shelf 1",
        "take apple 1 from shelf 1",
        "take key 1 from shelf 1",
        "take knife 1 from shelf 1",
    }
    state, _ = _play(game, "go to shelf 1", "take key 1 from shelf 1", "go to desk 1")
    # The key is in the hand and, by the desk's own record, still on the desk.
    assert {one for one in world.moves(game, state) if "key" in one} == {"examine key 1", "move key 1 to desk 1"}
    assert "key 1" in world.describe(game, state, world.Move("examine", where=game.receptacles.index("desk 1")))


@pytest.mark.parametrize("name", sample.GAMES)
def test_a_walkthrough_wins_on_its_last_step_and_not_before(name: str) -> None:
    game = _game(name)
    for count in range(len(game.walkthrough) + 1):
        state, _ = _play(game, *game.walkthrough[:count])
        assert world.won(game, state) == (count == len(game.walkthrough))


@pytest.mark.parametrize(
    ("name", "commands"),
    [
        ("heat", ["go to shelf 1", "take apple 1 from shelf 1", "go to desk 1", "move apple 1 to desk 1"]),
        ("put", ["go to desk 1", "take key 1 from desk 1", "go to microwave 1", "open microwave 1"]),
        ("light", ["go to desk 1", "use desklamp 1"]),
        ("light", ["go to desk 1", "use desklamp 1", "take key 1 from desk 1", "go to shelf 1"]),
        (
            "two",
            ["go to fridge 1", "open fridge 1", "take apple 2 from fridge 1", "go to desk 1", "move apple 2 to desk 1"],
        ),
    ],
)
def test_less_than_the_goal_does_not_win(name: str, commands: list[str]) -> None:
    game = _game(name)
    assert not world.won(game, _play(game, *commands)[0])


@given(st.sampled_from(sorted(sample.GAMES)), st.randoms(use_true_random=False))
def test_walks_keep_the_house_in_order(name: str, rng: random.Random) -> None:
    game = _game(name)
    state = game.first
    for _ in range(40):
        found = world.moves(game, state)
        move = found[rng.choice(sorted(found))]
        before, state = state, world.apply(game, state, move)
        hash(state)
        answer = world.describe(game, state, move)
        assert answer and (answer[-1] in ".\n" or move.verb == "help")
        assert state.held.bit_count() <= 1
        if move.verb in ("look", "examine", "inventory", "help"):
            assert state == before
        for r, things in enumerate(state.inside):
            assert not things & state.left[r]
        # Each pickupable thing that lay somewhere at first is in some receptacle or in the hand.
        placed = state.held
        for things in state.inside:
            placed |= things
        assert all(placed & things == things for things in game.first.inside)


@given(st.sets(st.integers(0, 80)))
def test_sets_of_numbers(numbers: set[int]) -> None:
    assert members(bits(numbers)) == sorted(numbers)


def test_the_environment_keeps_the_protocol(games: Path) -> None:
    spec = EnvSpec("sample", "tests.unit.alfworld_sample:SampleHouses", {"data": str(games)})
    report = check(spec, tasks=3)
    assert report.passed, "\n".join(report.lines())
    assert report.figures["expert_success"] == 1.0
    assert [one.name for one in report.checks if one.passed is None] == ["replay"]


def test_what_is_not_admissible_changes_nothing_and_costs_a_turn(games: Path) -> None:
    env = _env(games, max_turns=3)
    first = env.reset(Task("alfworld", "train/put.tw-pddl"))
    assert first.actions == env.list_actions() and "help" not in first.actions
    step = env.step("eat apple 1")
    assert step.observation.text == "Nothing happens." and step.observation.actions == first.actions
    assert env.step("  Go TO   Desk 1").observation.text.startswith("You arrive at desk 1.")
    last = env.step("help")
    assert last.observation.text == "Say what you want to do.\n"
    assert (last.truncated, last.terminated, last.info) == (True, False, {"success": False})
    with pytest.raises(RuntimeError, match="reset first"):
        env.step("look")


def test_reward_comes_with_the_goal(games: Path) -> None:
    env = _env(games)
    task = Task("alfworld", "train/light.tw-pddl")
    script = env.expert(task)
    assert script is not None
    steps = [env.step(action) for action in script]
    assert [step.reward for step in steps] == [0.0, 0.0, 1.0]
    assert steps[-1].terminated and not steps[-1].truncated and steps[-1].info == {"success": True}
    assert _env(games, max_turns=2).expert(task) is None


COUNTS = {"L0_train": 3553, "L0_test": 140, "L1_train": 3553, "L1_test": 134, "L2_train": 2207, "L2_test": 38}


@pytest.mark.parametrize(("split", "count"), COUNTS.items())
def test_a_split_has_the_papers_count(split: str, count: int) -> None:
    ids = ALFWorld.tasks(split)
    assert len(ids) == len(set(ids)) == count
    types = Counter(one.split("/")[1] for one in ids)
    unseen = {tasks.TYPES[5], tasks.TYPES[6]}
    assert set(types) == {"L2_train": set(tasks.TYPES.values()) - unseen, "L2_test": unseen}.get(
        split, set(tasks.TYPES.values())
    )
    assert {one.split("/")[1] for one in ids[: len(types)]} == set(types)


def test_ids_are_the_same_everywhere() -> None:
    text = "\n".join(f"{split} {one}" for split in COUNTS for one in ALFWorld.tasks(split))
    assert (
        hashlib.sha256(text.encode()).hexdigest() == "695ed67b51afb9adaa62c34060a678c9cc2060b8a5102d25eea73a3ad37f07b5"
    )
    assert ALFWorld.tasks("train") == ALFWorld.tasks("L0_train")
    assert ALFWorld.tasks("test") == ALFWorld.tasks("L0_test")
    with pytest.raises(ValueError, match="L2_test"):
        ALFWorld.tasks("dev")


@pytest.mark.parametrize(
    "bad",
    ["", "valid_seen", "valid_seen/pick_two_obj_and_place/24", "valid_seen/pick_two_obj_and_place/-1", "test/x/0"],
)
def test_an_unknown_task_is_refused(games: Path, bad: str) -> None:
    with pytest.raises(ValueError, match="no task"):
        _env(games).reset(Task("alfworld", bad))


def test_a_game_outside_the_data_is_refused(games: Path) -> None:
    with pytest.raises(ValueError, match="outside"):
        _env(games).reset(Task("alfworld", "../secret.tw-pddl"))


def test_missing_data_is_named_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCRL_DATA", str(tmp_path))
    with pytest.raises(ValueError, match=rf"{tmp_path}/alfworld holds no games; put the games .* option 'data'"):
        find_env("alfworld").make()
    (tmp_path / "alfworld" / "json_2.1.1" / "valid_seen").mkdir(parents=True)
    env = find_env("alfworld").make()
    with pytest.raises(ValueError, match=r"valid_seen holds 0 games of pick_and_place_simple, the release has 35"):
        env.reset(Task("alfworld", env.tasks("test")[0]))


def _release(root: Path, spoil: str = "") -> None:
    """Files where the games of ``valid_unseen`` would be, and some that the original leaves out."""
    for kind, count in zip(tasks.TYPES.values(), tasks.COUNTS["valid_unseen"], strict=True):
        names = [f"{kind}-A-None-B-{i}/trial_T{i}" for i in range(count)]
        names += [f"{kind}-ASliced-None-B-1/trial_T0", f"{kind}-A-None-B-1/trial_unsolved"]
        for name in names:
            file = root / "valid_unseen" / name / tasks.GAME
            file.parent.mkdir(parents=True)
            file.write_text(spoil or json.dumps({"solvable": "unsolved" not in name}))


def test_games_are_found_as_the_original_finds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _release(tmp_path)
    with pytest.raises(ValueError, match="other games than the release"):
        tasks.game_file(tmp_path, "valid_unseen/look_at_obj_in_light/0")
    names = sorted(
        f"{kind}-A-None-B-{i}/trial_T{i}"
        for kind, count in zip(tasks.TYPES.values(), tasks.COUNTS["valid_unseen"], strict=True)
        for i in range(count)
    )
    monkeypatch.setitem(tasks.LISTINGS, "valid_unseen", hashlib.sha256("\n".join(names).encode()).hexdigest())
    found = tasks.game_file(tmp_path, "valid_unseen/look_at_obj_in_light/2")
    assert found.relative_to(tmp_path).parts[1:3] == ("look_at_obj_in_light-A-None-B-10", "trial_T10")


def test_an_unreadable_game_among_them_is_named(tmp_path: Path) -> None:
    _release(tmp_path, spoil="{")
    with pytest.raises(ValueError, match=r"game\.tw-pddl is damaged .* put the games"):
        tasks.game_file(tmp_path, "valid_unseen/look_at_obj_in_light/0")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: text[: len(text) // 2], "is damaged .* put the games"),
        (lambda text: text.replace("pddl_problem", "problem"), "is damaged .*pddl_problem.* put the games"),
        (lambda text: "[]", "is damaged .* put the games"),
        (lambda text: text.replace('"sample"', '"another"'), "rules are not those of ALFWorld 0.4; .*engine: stock"),
        (lambda text: text.replace("(atLocation agent1", "(near agent1"), "cannot be played"),
        (lambda text: text.replace("exists (?r", "forall (?r"), "cannot be played: unknown form of goal"),
    ],
)
def test_a_damaged_game_is_named_with_the_remedy(games: Path, tmp_path: Path, change, says: str) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "spoilt.tw-pddl"
    file.write_text(change((games / "train" / "put.tw-pddl").read_text()))
    with pytest.raises(ValueError, match=f"{re.escape(str(file))}.*{says}"):
        load_game(file)


def test_a_missing_game_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*gone\.tw-pddl \(No such file"):
        load_game(tmp_path / "gone.tw-pddl")


@pytest.mark.parametrize(
    ("options", "says"), [({"engine": "slow"}, "'fast' or 'stock'"), ({"max_turns": 0}, "at least 1")]
)
def test_bad_options_are_refused(games: Path, options: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        _env(games, **options)
