"""ALFWorld's fast engine against the original one, and the release's games where they are.

The original engine needs the extra ``alfworld``, the games a folder ``$ASYNCRL_DATA/alfworld`` (or the default cache);
what is missing skips its tests and says so. ``scripts/compare_alfworld.py`` compares more games than fit in here.
"""

import hashlib
import json
import random
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import pytest

from asyncrl.env import ReplayMismatch, Trace, find_env, replay
from asyncrl.types import Task
from envs.alfworld import game
from envs.alfworld.env import ALFWorld, FastEngine
from envs.alfworld.tasks import find_games, game_file, task_ids
from envs.check import check
from envs.data_home import data_folder
from tests.unit import alfworld_sample as sample

pytestmark = pytest.mark.integration

EXTRA = all(find_spec(name) for name in ("alfworld", "textworld", "fast_downward"))
original = pytest.mark.skipif(not EXTRA, reason="the extra 'alfworld' is not installed")


def _root() -> Path | None:
    try:
        return find_games(data_folder("alfworld"))
    except ValueError:
        return None


ROOT = _root()
release = pytest.mark.skipif(ROOT is None, reason=f"ALFWorld's games are not in {data_folder('alfworld')}")


@pytest.fixture(scope="module")
def sample_games(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Our own houses under the rules that the package ``alfworld`` brings.

    They differ from the release's in the words of ``help``, which the package derives and a release's game spells out,
    and in that a plain sink does not clean; the houses have a sink basin.
    """
    from scripts.compare_alfworld import hasten

    hasten()
    brought = files("alfworld") / "data"
    domain, grammar = (brought / name for name in ("alfred.pddl", "alfred.twl2"))
    words = grammar.read_text().replace("UNKNOWN GOAL.", "TASK").replace('"#help.feedback#"', '"Say it."')
    folder = tmp_path_factory.mktemp("alfworld") / "train"
    folder.mkdir()
    for name in sample.GAMES:
        (folder / f"{name}.tw-pddl").write_text(json.dumps(sample.content(name, domain.read_text(), words)))
    game.RULES.add(hashlib.sha256((domain.read_text() + words.replace("TASK", "")).encode()).hexdigest())
    return folder


@original
@pytest.mark.parametrize("name", sample.GAMES)
def test_both_engines_play_our_houses_alike(sample_games: Path, name: str) -> None:
    from envs.alfworld.stock import StockEngine
    from scripts.compare_alfworld import Tally, compare

    tally = Tally()
    compare(sample_games / f"{name}.tw-pddl", FastEngine(), StockEngine(), tally, steps=40, seed=name)
    assert tally.differences == []
    assert tally.won >= 1 and tally.steps > 10


@original
def test_our_record_of_the_original_engine_is_true(sample_games: Path) -> None:
    from envs.alfworld.stock import StockEngine

    engine = StockEngine()
    engine.begin(sample_games / "put.tw-pddl")
    assert [(command, engine.act(command)) for command, _ in sample.SCRIPT] == list(sample.SCRIPT)


@original
def test_the_original_engine_branches_by_verified_replay(sample_games: Path) -> None:
    env = sample.SampleHouses(data=str(sample_games.parent), engine="stock")
    other = sample.SampleHouses(data=str(sample_games.parent), engine="stock")
    task = Task("alfworld", "train/heat.tw-pddl")
    script = env.expert(task)
    assert script is not None
    for action in script[:3]:
        step = env.step(action)
    kept = env.snapshot()
    assert other.restore(kept).same_as(step.observation)
    future = [env.step(action) for action in script[3:]]
    again = [other.step(action) for action in script[3:]]
    assert [one.observation.text for one in future] == [one.observation.text for one in again]
    assert future[-1].info == again[-1].info == {"success": True}
    *rest, answered = kept
    forged = (*rest, [*answered[:-1], (answered[-1][0], "You arrive somewhere else.")])
    with pytest.raises(ReplayMismatch, match="diverged at step 3 in observation"):
        other.restore(forged)


@original
@release
@pytest.mark.parametrize("number", range(6))
def test_both_engines_play_the_release_alike(number: int) -> None:
    from envs.alfworld.stock import StockEngine
    from scripts.compare_alfworld import Tally, compare

    assert ROOT is not None
    one = task_ids("L1_test")[number]  # one of each type
    tally = Tally()
    compare(game_file(ROOT, one), FastEngine(), StockEngine(), tally, steps=20, seed=one)
    assert tally.differences == []


@release
@pytest.mark.parametrize("split", ["L0_train", "L0_test", "L1_test"])
def test_every_game_of_the_release_is_found(split: str) -> None:
    assert ROOT is not None
    found = {game_file(ROOT, one) for one in task_ids(split)}
    assert len(found) == len(task_ids(split)) and all(path.is_file() for path in found)


@release
def test_the_protocol_is_kept_on_real_games() -> None:
    report = check(find_env("alfworld"), tasks=6)
    assert report.passed, "\n".join(report.lines())
    assert report.figures["expert_success"] == 1.0


@release
def test_the_expert_wins_two_hundred_games() -> None:
    env, won = ALFWorld(), 0
    for one in random.Random(0).sample(task_ids("train"), 200):
        task = Task("alfworld", one)
        script = env.expert(task)
        steps = [env.step(action) for action in script or ()]
        won += bool(steps and steps[-1].info.get("success"))
    assert won == 200


@release
def test_two_hundred_random_prefixes_are_copied_and_replayed_exactly() -> None:
    rng, env, copied, replayed = random.Random(1), ALFWorld(), ALFWorld(), ALFWorld()
    for one in rng.sample(task_ids("train"), 200):
        task = Task("alfworld", one)
        trace = Trace(task, env.reset(task))
        for _ in range(rng.randrange(1, 30)):
            action = rng.choice(trace.last.actions or ())
            trace.add(action, env.step(action))
            if trace.steps[-1].done:
                break
        assert copied.restore(env.snapshot()).same_as(trace.last)
        assert replay(replayed, trace, env.list_actions()).same_as(trace.last)
        if not trace.steps[-1].done:
            action = rng.choice(trace.last.actions or ())
            step = env.step(action)
            for other in (copied, replayed):
                again = other.step(action)
                assert again.observation.same_as(step.observation) and again[1:] == step[1:]
