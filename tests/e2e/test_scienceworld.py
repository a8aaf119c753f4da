"""SPARK's trees on the real ScienceWorld: branches by verified replay, one task a group."""

import pytest

from asyncrl.tree.records import read
from tests.e2e.conftest import finish
from tests.recount import recount


@pytest.mark.timeout(900)
def test_trees_grow_by_verified_replay(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("scienceworld")
    run = finish(["train", "configs/scienceworld_spark_smoke.yaml", "eval.tasks=1"], folder, timeout_s=800)
    counted = recount(read(run.folder / "trees.jsonl"))
    assert run.summary["updates"] >= 3
    assert counted.problems == []
    assert counted.children == run.summary["branches_verified"] > 0
    assert run.summary["replayed_steps"] > 0
    assert run.summary["replay_mismatches"] == 0
    assert run.summary["digest_mismatches"] == 0
