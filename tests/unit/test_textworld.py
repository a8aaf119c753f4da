"""TextWorld without the package: ids, splits, what is refused, and games on disk. Integration plays real games."""

import importlib.util
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.load import load
from asyncrl.env import find_env
from envs.gym import IDS
from envs.textworld import cache
from envs.textworld.env import TextWorld
from envs.textworld.files import GameFiles, digest, is_whole, read
from envs.textworld.tasks import HIGHEST, LEVELS, MAX_SEED, SEEDS, parse_id, task_ids

KINDS = [(challenge, level) for challenge, levels in LEVELS.items() for level in levels]
ONE = "cooking-1-7"


def _write(folder: Path, task_id: str = ONE, story: bytes = b"story", text: str = '{"a": 1}') -> GameFiles:
    files = GameFiles.of(folder, task_id)
    folder.mkdir(parents=True, exist_ok=True)
    files.story.write_bytes(story)
    files.record.write_text(json.dumps({"digest": digest(story, text), "game": text}))
    return files


def test_a_split_goes_round_all_kinds_of_game() -> None:
    for split, seeds in SEEDS.items():
        ids = task_ids(split)
        assert len(ids) == len(set(ids)) == len(KINDS) * len(seeds)
        assert [parse_id(one)[:2] for one in ids[: len(KINDS)]] == KINDS
        assert {parse_id(one).seed for one in ids} == set(seeds)
    assert not {parse_id(one).seed for one in task_ids("train")} & {parse_id(one).seed for one in task_ids("test")}
    assert all(parse_id(one).held_out for one in task_ids("test"))
    assert not any(parse_id(one).held_out for one in task_ids("train"))


def test_a_challenge_and_a_level_have_splits_of_their_own() -> None:
    assert task_ids("cooking-2_test")[:2] == ["cooking-2-1000000", "cooking-2-1000001"]
    assert task_ids("treasure_hunter_train")[:5] == [
        "treasure_hunter-5-0",
        "treasure_hunter-10-0",
        "treasure_hunter-15-0",
        "treasure_hunter-20-0",
        "treasure_hunter-5-1",
    ]
    assert task_ids("coin_collector-7_train")[0] == "coin_collector-7-0"  # a level that no other split has


@pytest.mark.parametrize(
    "split", ["", "dev", "_train", "cooking", "cooking-5_train", "simple_train", "coin_collector-101x_test", "-2_test"]
)
def test_an_unknown_split_is_refused(split: str) -> None:
    with pytest.raises(ValueError, match="known: train, test, coin_collector_train"):
        task_ids(split)


@pytest.mark.parametrize(
    "task_id",
    ["", "cooking", "cooking-1", "cooking-0-1", "cooking-5-1", "simple-1-1", "coin_collector-5--1", "cooking-1-1/..",
     "../cooking-1-1", "cooking-1-¹", "cooking-1-1\n", "coin_collector-200-1", "treasure_hunter-31-0",
     f"cooking-1-{MAX_SEED + 1}"],
)  # fmt: skip
def test_what_is_no_id_is_refused(task_id: str) -> None:
    with pytest.raises(ValueError, match="ids look like 'coin_collector-5-17'"):
        parse_id(task_id)


def test_an_id_has_one_spelling() -> None:
    with pytest.raises(ValueError, match="'cooking-1-7'"):
        parse_id("cooking-01-007")


@given(st.text(max_size=30))
def test_any_text_is_an_id_or_refused(text: str) -> None:
    try:
        found = parse_id(text)
    except ValueError:
        return
    assert text == f"{found.challenge}-{found.level}-{found.seed}" and found.level <= HIGHEST[found.challenge]


def test_a_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for call in (TextWorld.preflight, TextWorld):
        with pytest.raises(ValueError, match=r"'textworld' is not installed.*pip install 'asyncrl\[textworld\]'"):
            call()
    assert TextWorld.tasks("test") == task_ids("test")


def test_a_bad_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="max_turns must be at least 1, got 0"):
        TextWorld(max_turns=0)


def test_it_is_registered() -> None:
    assert find_env("textworld").env_class() is TextWorld and IDS["asyncrl/TextWorld-v0"] == "textworld"


def test_the_recipe_holds() -> None:
    config = load(Path(__file__).parents[2] / "configs" / "textworld_spark.yaml")
    assert config.env.name == "textworld" and config.tree.criterion == "explore"


def test_a_game_on_disk_is_read_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = _write(tmp_path)
    monkeypatch.setattr(cache, "make_games", None)  # nothing is made
    assert cache.find_game(tmp_path, ONE) == read(files) == (files.story, '{"a": 1}', digest(b"story", '{"a": 1}'))


@pytest.mark.parametrize("name", ["story", "record"])
@pytest.mark.parametrize("damage", ["gone", "cut", "emptied", "changed"])
def test_a_damaged_game_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, damage: str) -> None:
    files = _write(tmp_path)
    path: Path = getattr(files, name)
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes({"cut": content[:-2], "emptied": b"", "changed": content.replace(b"t", b"T", 1)}[damage])
    assert not is_whole(files)
    made: list[list[str]] = []

    def make(folder: Path, ids: list[str]) -> None:
        made.append(ids)
        _write(folder)

    monkeypatch.setattr(cache, "make_games", make)
    assert cache.find_game(tmp_path, ONE).text == '{"a": 1}' and made == [[ONE]]


@pytest.mark.parametrize("record", ["[]", "{}", "null", '{"digest": 1, "game": 2}', '{"digest": "x", "game": "{}"}'])
def test_a_record_of_another_shape_is_damage(tmp_path: Path, record: str) -> None:
    files = _write(tmp_path)
    files.record.write_text(record)
    assert not is_whole(files)


def test_a_bad_id_makes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ids look like"):
        cache.find_game(tmp_path, "../../etc-1-1")
    assert not list(tmp_path.iterdir())


def test_a_failing_generator_is_an_error_with_what_it_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = subprocess.run

    def broken(command: list[str], **options: Any) -> Any:
        options["env"] = options["env"] | {"PYTHONHASHSEED": "7"}
        return run(command, **options)

    monkeypatch.setattr(subprocess, "run", broken)
    with pytest.raises(RuntimeError, match=r"cooking-1-7.*exit code 1.*set PYTHONHASHSEED=0"):
        cache.make_games(tmp_path, [ONE])


def test_a_slow_generator_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(command: list[str], timeout: float, **options: Any) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", slow)
    with pytest.raises(RuntimeError, match="took more than 300 s"):
        cache.make_games(tmp_path, [ONE])
