"""TextWorld with the real package: games made alike everywhere, played, won, lost, and copied exactly.

Needs the extra ``textworld``. The games are made once, in one process, which takes most of the time here.
"""

import os
import pickle
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

from asyncrl.env import EnvSpec, Trace, replay
from asyncrl.types import Step, Task
from envs.check import check
from envs.textworld.cache import game_folder, make_games
from envs.textworld.env import TextWorld
from envs.textworld.files import GameFiles
from tests.unit.textworld_sample import COIN, GAMES, MEAL, TEST_MEAL, TREASURE

EXTRA = all(find_spec(name) for name in ("textworld", "jericho"))
pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:Game '.*' is not fully supported"),  # by jericho
    pytest.mark.skipif(not EXTRA, reason="the extra 'textworld' is not installed"),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("textworld")
    make_games(game_folder(str(folder)), list(GAMES))
    return str(folder)


@pytest.fixture(scope="module")
def env(data: str) -> TextWorld:
    return TextWorld(data=data)


def _task(task_id: str) -> Task:
    return Task("textworld", task_id)


def _play(env: TextWorld, *commands: str) -> list[Step]:
    return [env.step(command) for command in commands]


def test_racing_processes_repair_a_game_once_and_to_the_same_bytes(data: str, tmp_path: Path) -> None:
    """Made first in its process, not after others, under other salts of ``hash`` and in another working folder."""
    code = "import pathlib as p, sys, envs.textworld.cache as c; c.find_game(p.Path(sys.argv[1]), sys.argv[2])"
    here, there = GameFiles.of(game_folder(data), TEST_MEAL), GameFiles.of(tmp_path / "games", TEST_MEAL)
    there.story.parent.mkdir()
    there.record.write_bytes(here.record.read_bytes())
    there.story.write_bytes(here.story.read_bytes()[:1000])

    def race(salt: int) -> subprocess.CompletedProcess[bytes]:
        paths = os.pathsep.join(filter(None, [os.getcwd(), *sys.path]))
        environ = {**os.environ, "PYTHONHASHSEED": str(salt), "PYTHONPATH": paths}
        command = [sys.executable, "-c", code, str(there.story.parent), TEST_MEAL]
        return subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, timeout=280, check=False)

    with ThreadPoolExecutor(3) as pool:
        for done in pool.map(race, (1, 2, 3)):
            assert done.returncode == 0, done.stderr.decode()
    assert [path.read_bytes() for path in here] == [path.read_bytes() for path in there]
    assert {path.suffix for path in there.story.parent.iterdir()} == {".lock", ".json", ".z8"}  # nothing half made


@pytest.mark.parametrize("task_id", GAMES)
def test_the_walkthrough_wins_with_its_last_command(env: TextWorld, task_id: str) -> None:
    script = env.expert(_task(task_id))
    assert script
    steps = _play(env, *script)  # the expert leaves the environment reset
    assert [step.reward for step in steps] == [0.0] * (len(script) - 1) + [1.0]
    assert [step.done for step in steps] == [False] * (len(script) - 1) + [True]
    assert steps[-1].terminated and steps[-1].info == {"success": True, "score": 1.0}
    assert env.list_actions() == steps[-1].observation.actions == ()
    with pytest.raises(RuntimeError, match="call reset first"):
        env.step("look")


def test_what_the_agent_reads(env: TextWorld) -> None:
    first = env.reset(_task(COIN))
    assert first.text.startswith("-= ") and first.actions is not None
    assert "coin" in first.goal and "TextWorld" in first.goal and "go " not in first.goal
    texts = [step.observation.text for step in _play(env, *(env.expert(_task(COIN)) or ()))]
    assert texts[-1].endswith("*** The End ***")
    for text in (first.text, *texts):
        assert text == text.strip() and "$$" not in text and "succeeded]" not in text and "\n>" not in text
        assert "0/" not in text and "\n\n\n" not in text
    assert first.actions == tuple(sorted(first.actions)) and {"inventory", "look"} <= set(first.actions)


def test_points_are_a_share_and_a_spoilt_meal_is_lost(env: TextWorld) -> None:
    script = env.expert(_task(MEAL)) or []
    at = next(i for i, command in enumerate(script) if command.startswith("take") and "knife" not in command)
    _play(env, *script[: at + 1])
    anchor = env.reset(_task(MEAL)).anchor
    short = TextWorld(data=str(Path(env._folder).parent), max_turns=at + 1)
    short.reset(_task(MEAL))
    last = _play(short, *script[: at + 1])[-1]
    assert last.truncated and not last.terminated and last.reward == 0.0 and last.observation.anchor != anchor
    assert not last.info["success"] and 0 < last.info["score"] < 1
    assert short.expert(_task(MEAL)) is None
    food = script[at].removeprefix("take ").split(" from ")[0]
    _play(env, *script[: at + 1])
    for command in (f"cook {food} with stove", "open oven", f"cook {food} with oven", f"cook {food} with stove"):
        step = env.step(command)
        if step.done:
            break
    assert step.terminated and step.reward == 0.0 and step.info["success"] is False


@pytest.mark.parametrize(
    "command",
    ["save", "script", "quit", "restart", "restore", "tw-trace-actions", "take knife from table. save", "again", "then",
     "look\nsave", "verbose", "undo", "take all", "get knife", "eat knife", "take knife then look", "", "go", "KNIFE",
     "examine knife and table", "x" * 1000, "\x00", "ключ"],
)  # fmt: skip
def test_what_is_not_admissible_changes_nothing(
    env: TextWorld, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    env.reset(_task(MEAL))
    _play(env, "open fridge")
    before = env.snapshot()[-1]
    seen = env.step(command).observation
    assert seen.text and env.snapshot()[-1] == before
    assert not list(tmp_path.iterdir())
    assert env.step("take knife from table").observation.text == "You take the knife from the table."


def test_case_and_blanks_do_not_matter_and_refusals_are_the_games_own(env: TextWorld) -> None:
    env.reset(_task(COIN))
    refused = next(f"go {way}" for way in ("north", "east", "south", "west") if f"go {way}" not in env.list_actions())
    assert env.step(refused).observation.text == "You can't go that way."
    assert env.step("  Inventory \n").observation.text.startswith("You are carrying")


def test_two_hundred_random_prefixes_are_copied_and_replayed_exactly(data: str) -> None:
    rng = random.Random(1)
    env, copied, replayed = (TextWorld(data=data) for _ in range(3))
    for number in range(200):
        task = _task(GAMES[number % 3])
        trace = Trace(task, env.reset(task))
        for _ in range(rng.randrange(1, 16)):
            # Moves and deeds rather than looks, so that much of each game is seen.
            deeds = [one for one in trace.last.actions or () if not one.startswith(("examine", "look", "inventory"))]
            action = (
                rng.choice(deeds) if deeds and rng.random() < 0.8 else rng.choice([*(trace.last.actions or ()), "go"])
            )
            trace.add(action, env.step(action))
            if trace.steps[-1].done:
                break
        assert copied.restore(pickle.loads(pickle.dumps(env.snapshot()))).same_as(trace.last)
        assert replay(replayed, trace, env.list_actions()).same_as(trace.last)
        assert copied.snapshot() == env.snapshot() == replayed.snapshot()
        ahead = rng.randrange(4)
        while ahead and not trace.steps[-1].done:
            action, ahead = rng.choice(env.list_actions()), ahead - 1
            step = env.step(action)
            for other in (copied, replayed):
                again = other.step(action)
                assert again.observation.same_as(step.observation) and again[1:] == step[1:]
                assert again.observation.anchor == step.observation.anchor
            trace.add(action, step)


def test_a_snapshot_is_small_and_restored_in_another_process(data: str, tmp_path: Path) -> None:
    env, kept = TextWorld(data=data), []
    for task_id in GAMES[:3]:
        script = env.expert(_task(task_id)) or []
        half = len(script) // 2
        _play(env, *script[:half])
        kept.append((env.snapshot(), env.list_actions(), script[half:]))
    assert max(len(pickle.dumps(snapshot)) for snapshot, _, _ in kept) < 8_000
    (tmp_path / "kept").write_bytes(pickle.dumps((data, kept)))
    code = (
        "import pickle, sys; from envs.textworld.env import TextWorld\n"
        "data, kept = pickle.load(open(sys.argv[1], 'rb'))\n"
        "env = TextWorld(data=data)\n"
        "for snapshot, actions, rest in kept:\n"
        "    assert env.restore(snapshot).actions == actions\n"
        "    assert [env.step(one) for one in rest][-1].info['success']\n"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONHASHSEED": "77"}
    command = [sys.executable, "-c", code, str(tmp_path / "kept")]
    done = subprocess.run(command, env=environ, capture_output=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_a_snapshot_of_another_game_is_refused(env: TextWorld) -> None:
    env.reset(_task(COIN))
    task, text, turns, live, saved = env.snapshot()
    with pytest.raises(ValueError, match="the snapshot is of another game"):
        env.restore((_task(TREASURE), text, turns, live, saved))
    assert env.restore((task, text, turns, live, saved)).text == text


def test_the_protocol_is_kept(data: str) -> None:
    report = check(EnvSpec("textworld", "tests.unit.textworld_sample:FourGames", {"data": data}))
    assert report.passed, "\n".join(report.lines())
    assert next(one.passed for one in report.checks if one.name == "snapshot")
    assert report.figures["expert_success"] == 1.0
