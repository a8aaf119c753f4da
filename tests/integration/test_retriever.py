"""The retriever on a real Ray Serve: Search-R1's interface, batches, many clients, the environment behind it."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

from asyncrl.types import Task
from envs.searchqa.client import HttpRetriever, RetrieverDown, Service
from envs.searchqa.env import SAMPLE, SearchQA
from envs.searchqa.index import open_index

pytestmark = pytest.mark.integration

CORPUS = SAMPLE / "corpus.jsonl"
INDEX = open_index(CORPUS)


@pytest.fixture(scope="module")
def address(ray_cluster: None) -> Iterator[str]:
    from ray import serve

    from asyncrl.serve.retriever import start

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    yield start(CORPUS, "127.0.0.1", port, replicas=2)
    serve.shutdown()


def test_it_answers_as_search_r1s_server_does(address: str) -> None:
    asked = {"queries": ["chief town of Quillet", "xyzzy"], "topk": 2, "return_scores": True}
    answer = requests.post(f"{address}/retrieve", json=asked, timeout=30)
    hits, nothing = answer.json()["result"]
    assert answer.status_code == 200 and nothing == [] and len(hits) == 2
    assert set(hits[0]) == {"document", "score"} and set(hits[0]["document"]) == {"id", "contents"}
    assert hits[0]["document"]["contents"].startswith('"Quillet"\n') and hits[0]["score"] >= hits[1]["score"]
    (plain,) = requests.post(f"{address}/retrieve", json={"queries": ["Quillet"]}, timeout=30).json()["result"]
    assert len(plain) <= 3 and set(plain[0]) == {"id", "contents"}


@pytest.mark.parametrize(
    "asked",
    [{}, {"queries": "x"}, {"queries": ["x"], "topk": 0}, {"queries": ["x"] * 1025}, {"queries": ["x" * 10_001]}],
)
def test_what_is_no_question_is_refused_with_a_reason(address: str, asked: dict[str, object]) -> None:
    answer = requests.post(f"{address}/retrieve", json=asked, timeout=30)
    assert answer.status_code == 422 and answer.json()["detail"][0]["loc"][0] == "body"


def test_many_clients_get_each_their_own(address: str) -> None:
    """Of different sizes, so that batches mix them; twice, so that the second time comes from memory."""
    client = HttpRetriever(Service(address))
    asked = [([f"{one.contents.split()[0]} lake {i % 3}"], 1 + i % 4) for i, one in enumerate(INDEX.corpus)] * 2
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda one: client.search(*one), asked))
    assert found == [INDEX.search(queries, k) for queries, k in asked]


def test_an_episode_by_way_of_the_service_is_the_one_without(address: str) -> None:
    far, near = SearchQA(data="sample", retriever=address), SearchQA(data="sample")
    for task_id in SearchQA.tasks("sample_test")[:5]:
        task = Task("searchqa", task_id)
        moves = near.expert(task)
        assert far.reset(task).same_as(near.reset(task))
        for move in moves:
            one, other = far.step(move), near.step(move)
            assert one.observation.same_as(other.observation) and one[1:] == other[1:]
        assert one.reward == 1.0


def test_a_service_that_went_away_is_named(address: str) -> None:
    """Last: it takes the service down."""
    from ray import serve

    client = HttpRetriever(Service(address, timeout_s=5, retries=1))
    assert client.search(["isle"], 1)
    serve.delete("retriever")
    with pytest.raises(RetrieverDown, match=rf"retriever {address}/retrieve does not answer .*asyncrl serve retriever"):
        client.search(["isle"], 1)
