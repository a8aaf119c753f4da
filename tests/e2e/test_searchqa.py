"""Search QA from the command line: a whole run on its own sample, and its retriever as a service."""

import json
import re
import signal
import socket
import time
from pathlib import Path

import pytest

from asyncrl.tree.records import read
from envs.searchqa.client import HttpRetriever, Service
from envs.searchqa.env import SAMPLE
from tests.e2e.conftest import finish, start, wait_for_no_survivor
from tests.recount import recount

MOVE = re.compile(r"<(search|answer)>.+</\1>", re.DOTALL)


@pytest.mark.slow
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


def test_a_retriever_is_served_until_it_is_ended_and_leaves_nothing(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    mark, log = tmp_path.name, tmp_path / "log.txt"
    corpus = str(SAMPLE / "corpus.jsonl")
    process = start(["serve", "retriever", corpus, "--port", address.rpartition(":")[2]], mark, log)
    try:
        end = time.monotonic() + 200
        while f"retriever: {address}/retrieve" not in log.read_text() and process.poll() is None:
            assert time.monotonic() < end, log.read_text()[-4000:]
            time.sleep(0.2)
        (hits,) = HttpRetriever(Service(address)).search(["chief town of Quillet"], 1)
        assert hits[0].passage.contents.startswith('"Quillet"')
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143, log.read_text()[-4000:]
    finally:
        process.kill()
    assert wait_for_no_survivor(mark) == []


def test_an_index_that_is_not_there_is_answered_before_anything_starts(tmp_path: Path) -> None:
    process = start(["serve", "retriever", str(tmp_path)], tmp_path.name, tmp_path / "log.txt")
    assert process.wait(60) == 2
    said = (tmp_path / "log.txt").read_text()
    assert "index.json: missing; make it with: python -m envs.searchqa.index" in said and "Traceback" not in said
