"""Search QA's corpus, indexes and HTTP client: what they find, and what they say when something is wrong."""

import json
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.types import Task
from envs.searchqa import index as indexes
from envs.searchqa.client import HttpRetriever, RetrieverDown, Service, shared
from envs.searchqa.env import SAMPLE, SearchQA
from envs.searchqa.index import Bm25, Dense, build, open_index
from envs.searchqa.passages import Corpus, Passage, passage
from tests.http_server import serving

CORPUS = SAMPLE / "corpus.jsonl"
INDEX = open_index(CORPUS)


def ids(hits: Sequence[Any]) -> list[str]:
    return [hit.passage.id for hit in hits]


# --- corpus


def test_records_of_either_form_are_passages() -> None:
    assert passage({"id": 7, "contents": "x"}) == Passage("7", "x")
    assert passage({"id": "7", "title": "T", "text": "x"}) == Passage("7", '"T"\nx')
    assert passage({"id": "7", "text": "x"}) == Passage("7", "x")


@pytest.mark.parametrize(
    "bad", [{}, {"id": 1}, {"contents": "x"}, {"id": 1, "contents": " "}, {"id": 1, "text": 3}, [], None]
)
def test_a_record_without_id_or_text_is_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"'id'|'contents'"):
        passage(bad)


@given(st.lists(st.text(min_size=1).filter(str.strip), min_size=1, max_size=8), st.booleans())
def test_a_corpus_gives_back_every_line(texts: list[str], ends: bool) -> None:
    import tempfile

    lines = [json.dumps({"id": i, "contents": text}, ensure_ascii=False) for i, text in enumerate(texts)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c.jsonl"
        path.write_bytes(("\n\n".join(lines) + "\n" * ends).encode("utf-8", "replace"))
        corpus = Corpus(path)
        assert [one.contents for one in corpus] == [text.encode("utf-8", "replace").decode() for text in texts]


def test_a_bad_corpus_is_named(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    for content, problem in ((None, "cannot be read"), ("", "cannot be read"), ("\n \n", "holds no passage")):
        if content is not None:
            path.write_text(content)
        with pytest.raises(ValueError, match=rf"corpus .*c.jsonl: {problem}.*; give a file of JSON lines|{problem}"):
            Corpus(path)
    path.write_text('{"id": 1, "contents": "x"}\n{"id": 2}\n')
    with pytest.raises(ValueError, match=r"corpus .*c.jsonl: passage 1 is damaged: expected an object with 'id'"):
        open_index(path)


# --- index


def test_a_passage_is_found_by_its_words_stemmed() -> None:
    (hits,) = INDEX.search(["clockmakers of Mirth Haven"], 3)
    assert "clockmaker born in Mirth Haven" in hits[0].passage.contents
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)


def test_no_common_word_no_hit() -> None:
    assert INDEX.search(["xyzzy", "", "the of"], 3) == [[], [], []]
    assert len(INDEX.search(["isle"], 1000)[0]) <= len(INDEX.corpus)


@given(
    st.lists(st.sampled_from(["lake", "isle", "Umber", "founded", "xyzzy", "mills", "bees"]), min_size=1, max_size=5)
)
def test_a_batch_is_searched_as_each_query_alone(words: list[str]) -> None:
    queries = [" ".join(words[: i + 1]) for i in range(len(words))]
    assert INDEX.search(queries, 3) == [INDEX.search([query], 3)[0] for query in queries]


@given(st.lists(st.sampled_from(["a lake", "a lake", "an isle", "lake isle"]), min_size=1, max_size=30))
def test_the_best_hits_do_not_depend_on_how_many_are_asked_for(texts: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder, "corpus.jsonl")
        corpus.write_text("".join(json.dumps({"id": i, "contents": text}) + "\n" for i, text in enumerate(texts)))
        index = Bm25.build(Corpus(corpus))
        (all_of_them,) = index.search(["lake"], len(texts))
        for k in range(1, len(texts) + 1):
            assert index.search(["lake"], k) == [all_of_them[:k]]
    scores = [(-hit.score, int(hit.passage.id)) for hit in all_of_them]
    assert scores == sorted(scores)


def test_threads_search_at_once() -> None:
    queries = [f"isle lake {one.contents.split()[2]}" for one in INDEX.corpus] * 5
    alone = [ids(INDEX.search([query], 3)[0]) for query in queries]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda query: ids(INDEX.search([query], 3)[0]), queries)) == alone


def test_a_folder_searches_as_the_corpus_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    indexes.main([str(CORPUS), str(tmp_path / "index")])
    assert "40 passages indexed (bm25)" in capsys.readouterr().out
    queries = ["who made the Tide Clock", "Lake Vell", "xyzzy"]
    assert open_index(tmp_path / "index").search(queries, 5) == INDEX.search(queries, 5)
    with pytest.raises(SystemExit):
        indexes.main([str(CORPUS), str(tmp_path / "index")])
    assert "exists already; name a new folder" in capsys.readouterr().err


@pytest.mark.parametrize("harm", ["description", "corpus", "starts", "scores", "other corpus"])
def test_a_damaged_index_is_named_with_its_remedy(tmp_path: Path, harm: str) -> None:
    folder = tmp_path / "index"
    build(CORPUS, folder)
    if harm == "description":
        (folder / "index.json").write_text("{")
    elif harm == "scores":
        next((folder / "bm25").glob("data*.npy")).unlink()
    elif harm == "other corpus":
        with (folder / "corpus.jsonl").open("a") as file:
            file.write('{"id": 1, "contents": "x"}\n')
    else:
        next(folder.glob(f"{harm}.*")).unlink()
    with pytest.raises(ValueError, match=r"index .*index: damaged .*; make it with: python -m envs.searchqa.index"):
        open_index(folder)


def test_a_missing_index_and_a_large_corpus_are_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"index.json: missing; make it with: python -m envs.searchqa.index"):
        open_index(tmp_path)
    monkeypatch.setattr(indexes, "MADE_ON_THE_SPOT", 1000)
    with pytest.raises(ValueError, match=r"corpus.jsonl: larger than .* make one with: python -m envs.searchqa.index"):
        open_index(CORPUS)


def letters(texts: Sequence[str]) -> np.ndarray:
    """A stand-in for a model: counts of letters."""
    counts = np.array([[text.lower().count(chr(97 + i)) + 1e-3 for i in range(26)] for text in texts])
    return np.asarray(counts / np.linalg.norm(counts, axis=1, keepdims=True))


def test_a_dense_index_ranks_by_similarity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def encoder(model: str) -> Any:
        return lambda texts: seen.extend(texts) or letters([text.partition(": ")[2] for text in texts])

    monkeypatch.setattr(indexes, "_encoder", encoder)
    build(CORPUS, tmp_path / "index", dense="models/e5-base")
    made = open_index(tmp_path / "index")
    assert isinstance(made, Dense)
    wanted = made.corpus[11]
    (hits,) = made.search([wanted.contents], 3)
    assert hits[0].passage == wanted and hits[0].score == pytest.approx(1.0, abs=1e-5)
    assert hits[0].score >= hits[1].score >= hits[2].score
    assert [one.split(": ")[0] for one in seen] == ["passage"] * 40 + ["query"]


@given(st.integers(1, 45), st.integers(1, 50))
def test_a_dense_search_in_blocks_is_the_search_of_all(block: int, k: int) -> None:
    vectors = letters([one.contents for one in INDEX.corpus]).astype(np.float32)
    made = Dense(INDEX.corpus, vectors, "any", letters)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexes, "BLOCK", block)
        found = made.search(["lake umber", "old cray"], k)
    scores = letters(["lake umber", "old cray"]).astype(np.float32) @ vectors.T
    for hits, row in zip(found, scores, strict=True):
        best = np.sort(row)[::-1][:k]
        assert [hit.score for hit in hits] == pytest.approx(best.tolist(), abs=1e-6)
        assert len(set(ids(hits))) == len(hits) == min(k, 40)


def test_dense_without_its_package_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'asyncrl\[dense\]'"):
        build(CORPUS, tmp_path / "index", dense="any")
    assert not (tmp_path / "index").exists()


def test_a_missing_package_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    import envs.searchqa.index

    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(ImportError, match=r"pip install 'asyncrl\[searchqa\]'"):
        importlib.reload(envs.searchqa.index)


# --- client


@contextmanager
def server(*answers: tuple[int, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A service that gives these (status, body) in order, and then real ones; its address, and what it was asked."""
    asked: list[dict[str, Any]] = []
    queue = list(answers)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append({"path": self.path, **body})
            status, given = queue.pop(0) if queue else (200, real(body))
            if status == 0:
                stop.wait(5)
                return
            content = given if isinstance(given, bytes) else json.dumps(given).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None: ...

    def real(body: dict[str, Any]) -> Any:
        found = INDEX.search(body["queries"], body["topk"])
        return {"result": [[{"document": h.passage._asdict(), "score": h.score} for h in hits] for hits in found]}

    stop = threading.Event()
    with serving(Handler) as address:
        try:
            yield address, asked
        finally:
            stop.set()


def test_a_service_is_asked_as_search_r1s_is() -> None:
    with server() as (address, asked):
        found = HttpRetriever(Service(address)).search(["Lake Vell", "xyzzy"], 2)
        assert found == INDEX.search(["Lake Vell", "xyzzy"], 2)
        assert HttpRetriever(Service(f"{address}/other/")).search(["isle"], 1) == INDEX.search(["isle"], 1)
    first = {"path": "/retrieve", "queries": ["Lake Vell", "xyzzy"], "topk": 2, "return_scores": True}
    assert asked[0] == first and asked[1]["path"] == "/other"


def test_documents_of_search_r1_are_understood() -> None:
    document = {"id": "3", "title": "T", "text": "x"}
    with server((200, {"result": [[{"document": document, "score": "0.5"}]]})) as (address, _):
        assert HttpRetriever(Service(address)).search(["q"], 3) == [[indexes.Hit(Passage("3", '"T"\nx'), 0.5)]]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_passing_failure_is_tried_again(status: int) -> None:
    with server((status, {})) as (address, asked):
        assert HttpRetriever(Service(address)).search(["isle"], 1) == INDEX.search(["isle"], 1)
        assert len(asked) == 2


@pytest.mark.parametrize(
    ("answers", "tries", "problem"),
    [
        ([(503, {})] * 2, 2, "does not answer .*503"),
        ([(0, {})] * 2, 2, "does not answer .*timed out"),
        ([(404, {})], 1, "does not answer .*404"),
        ([(422, {})], 1, "does not answer .*422"),
        ([(200, b"<html>")], 1, "does not answer as Search-R1's does|does not answer .*JSON"),
        ([(200, {})], 1, "does not answer as Search-R1's does .KeyError"),
        ([(200, {"result": []})], 1, "0 results for 1 queries"),
        ([(200, {"result": [[{"document": {}}]]})], 1, "does not answer as Search-R1's does"),
    ],
)
def test_a_failure_names_address_and_remedy(answers: list[tuple[int, Any]], tries: int, problem: str) -> None:
    with server(*answers) as (address, asked):
        with pytest.raises(
            RetrieverDown, match=rf"retriever {address}/retrieve .*({problem}).*asyncrl serve retriever"
        ) as e:
            HttpRetriever(Service(address, timeout_s=0.3, retries=1)).search(["isle"], 1)
        assert len(asked) == tries and len(str(e.value)) < 700


def test_a_service_that_is_down_is_no_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    with server() as (address, _):
        pass
    env = SearchQA(data="sample", retriever=address, timeout_s=0.5, retries=0)
    env.reset(Task("searchqa", "sample/isles/0"))
    with pytest.raises(RetrieverDown, match=rf"{address}/retrieve does not answer .*refused"):
        env.step("<search>isle</search>")
    kept = env.snapshot()
    assert kept[1] == 0 and not kept[3]  # nothing happened: neither a turn nor an end


def test_what_a_process_asked_lately_is_remembered() -> None:
    with server() as (address, asked):
        for _ in range(3):
            env = SearchQA(data="sample", retriever=address)
            env.reset(Task("searchqa", "sample/isles/0"))
            env.step("<search>isle lake</search>")
        assert len(asked) == 1
        assert shared(Service(address)) is shared(Service(address))


def test_an_untrusted_query_reaches_the_service_as_text(tmp_path: Path) -> None:
    with server() as (address, asked):
        env = SearchQA(data="sample", retriever=address)
        env.reset(Task("searchqa", "sample/isles/0"))
        assert "Nothing was found" in env.step('<search>\ud800 "}],\n\x00</search>').observation.text
        env.step(f"<search>{'long ' * 4000}</search>")
    assert asked[0]["queries"] == ['? "}], \x00'] and len(asked[1]["queries"][0]) == 1000


def test_an_index_of_the_data_folder_is_used(tmp_path: Path) -> None:
    data = Path(shutil.copytree(SAMPLE, tmp_path / "data"))
    build(CORPUS, data / "index")
    (data / "corpus.jsonl").unlink()
    env = SearchQA(data=str(data), retriever=None)
    env.reset(Task("searchqa", "sample/isles/0"))
    assert isinstance(open_index(data / "index"), Bm25)
    assert "Doc 1" in env.step("<search>isle</search>").observation.text
