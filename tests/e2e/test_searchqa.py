"""A whole run on Search QA's own sample: its moves reach the environment, its results come back, thinking is cut."""

import json
import re

import pytest

from asyncrl.tree.records import read
from tests.e2e.conftest import finish
from tests.recount import recount

MOVE = re.compile(r"<(search|answer)>.+</\1>", re.DOTALL)


@pytest.mark.timeout(600)
def test_searches_are_made_and_seen(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("searchqa")
    run = finish(["train", "configs/searchqa_smoke.yaml", "runtime.versions=1", "eval.tasks=4"], folder, timeout_s=500)
    records = list(read(run.folder / "trees.jsonl"))
    assert recount(records).problems == []
    assert run.summary["digest_mismatches"] == 0 and run.summary["turns_cut"] > 0
    nodes = [{"by": {n["id"]: n for n in record["nodes"]}, **n} for record in records for n in record["nodes"]]
    searches = [n for n in nodes if n["action"].startswith("<search>")]
    assert searches and all(MOVE.fullmatch(n["action"]) for n in nodes if n["action"])
    after = [n for n in nodes if n["parent"] is not None and n["by"][n["parent"]]["action"].startswith("<search>")]
    results = [json.loads(n["observation"])["result"] for n in after]
    assert results and all(result.startswith(("Doc 1: ", "Nothing was found")) for result in results)
    assert not any("Nothing was done" in result for result in results)
