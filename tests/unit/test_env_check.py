"""The conformance checker passes sound environments and names the fault of each broken one."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from asyncrl.env import EnvSpec, find_env
from asyncrl.types import Observation, Task
from envs.check import Report, check


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.fixture
def _no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults that show within one process are sought within one: a new interpreter costs half a second."""

    def reset_here(spec: EnvSpec, tasks: Sequence[Task], salt: str) -> list[Observation]:
        env = spec.make()
        return [env.reset(task) for task in tasks]

    monkeypatch.setattr("envs.check._reset_elsewhere", reset_here)


def _check(name: str) -> Report:
    return check(EnvSpec(name, f"broken_envs:{name}"), tasks=3)


def _failed(report: Report) -> dict[str, str]:
    return {one.name: one.detail for one in report.checks if one.passed is False}


@pytest.mark.parametrize(("name", "unused"), [("Sound", "replay"), ("Replayed", "snapshot")])
def test_a_sound_environment_passes_everything(name: str, unused: str) -> None:
    report = _check(name)
    assert report.passed, "\n".join(report.lines())
    assert [one.name for one in report.checks if one.passed is None] == [unused]
    assert report.figures["expert_success"] == 1.0
    assert report.figures["steps_per_s"] > 0 and report.figures["branch_ms"] >= 0


def test_pantry_passes_everything() -> None:
    report = check(find_env("pantry"), tasks=5)
    assert report.passed, "\n".join(report.lines())
    assert len(report.checks) == 10


@pytest.mark.parametrize(
    ("name", "failing", "says"),
    [
        ("Random", {"determinism", "replay"}, "diverged at step 1 in observation"),
        ("RandomReward", {"determinism", "replay"}, "diverged at step 1 in reward"),
        ("Remembering", {"determinism", "fresh process"}, "diverged at step 0 in observation"),
        ("Aliased", {"snapshot"}, "restored into another instance, after the original went on"),
        ("Shared", {"snapshot"}, "after it and a copy went on"),
        ("Forgetful", {"snapshot"}, "differs at step"),
        ("Unlisted", {"replay"}, "admissible actions"),
        ("FreeText", {"determinism", "snapshot"}, "in observation"),
        ("Endless", {"limits"}, "not over after max_turns = 8"),
        ("Strict", {"malformed"}, "raised KeyError"),
        ("IntReward", {"types", "malformed"}, "reward is int, not float"),
        ("IntFlag", {"types", "malformed"}, "terminated is int, not bool"),
        ("PlainTuple", {"types", "malformed"}, "gave tuple, not Step"),
        ("ListedAsList", {"types", "malformed"}, "tuple of str"),
        ("Silent", {"limits"}, "'success'"),
        ("Leaking", {"splits"}, "share 1 ids, e.g. ['train-0']"),
        ("Empty", {"splits"}, "'test' holds no task"),
        ("AnySplit", {"splits"}, "not refused"),
        ("Unpicklable", {"pickling"}, "lambda"),
        ("Boastful", {"expert"}, "claims 3 tasks and solves 0"),
        ("Wandering", {"types"}, "goal changed"),
    ],
)
@pytest.mark.usefixtures("_no_processes")
def test_a_fault_is_found_by_its_check(name: str, failing: set[str], says: str) -> None:
    failed = _failed(_check(name))
    assert failing <= set(failed), failed  # a fault may show elsewhere too
    assert any(says in detail for detail in failed.values()), failed


def test_a_salted_hash_is_found_by_a_fresh_process() -> None:
    failed = _failed(_check("Salted"))
    assert set(failed) == {"fresh process", "expert"}
    assert "PYTHONHASHSEED" in failed["fresh process"] and "hash()" in failed["fresh process"]


def test_what_cannot_be_loaded_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot load 'broken_envs:NoSuch'"):
        _check("NoSuch")


@pytest.mark.usefixtures("_no_processes")
def test_the_report_reads_as_lines() -> None:
    lines = list(_check("Boastful").lines())
    assert "FAIL expert: the expert claims 3 tasks and solves 0" in lines
    assert any(line.startswith("ok   types: ") for line in lines)
    assert any(line.startswith("--   replay: ") for line in lines)
