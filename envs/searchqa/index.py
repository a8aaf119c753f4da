"""Finding passages: BM25 (bm25s) or dense vectors (sentence-transformers) over a corpus, in memory or from a folder.

Invariants:

* The same index gives the same hits in the same order for the same query, in every process; a passage that shares no
  word with a query is no hit of BM25.
* A folder holds the corpus, its lines' places, the index and a description. It gets its name when it is whole; one
  whose description does not fit the files beside it is refused with the command that makes the index again.
* Searching is safe from several threads.

    python -m envs.searchqa.index corpus.jsonl index [--dense intfloat/e5-base-v2]
"""

import argparse
import json
import logging
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from envs.searchqa.passages import Corpus, Passage

try:
    import bm25s
    import Stemmer
except ImportError as error:
    raise ImportError(
        "searchqa needs bm25s and PyStemmer; install them with: pip install 'asyncrl[searchqa]'"
    ) from error

MADE_ON_THE_SPOT = 64 * 2**20
"""Bytes of a corpus that is indexed when it is opened; a larger one wants an index folder."""
DESCRIPTION = "index.json"
BLOCK = 2**18
"""Passages whose dense scores are worked out at once."""
K1, B = 0.9, 0.4
"""Pyserini's, which Search-R1's BM25 runs with; bm25s's own find less here."""

logging.getLogger("bm25s").setLevel(logging.WARNING)  # it logs every build, and by a level of its own


class Hit(NamedTuple):
    passage: Passage
    score: float


class Retriever(Protocol):
    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """At most ``k`` hits of each query, the best first."""


class Bm25:
    """BM25 as Lucene scores it, with English stop words left out and words stemmed (Snowball)."""

    kind = "bm25"

    def __init__(self, corpus: Corpus, scores: bm25s.BM25) -> None:
        self.corpus, self._scores = corpus, scores

    @classmethod
    def build(cls, corpus: Corpus) -> "Bm25":
        scores = bm25s.BM25(method="lucene", k1=K1, b=B, backend="numpy")
        scores.index(_words([one.contents for one in corpus], ids=True), show_progress=False)
        return cls(corpus, scores)

    @classmethod
    def load(cls, folder: Path, corpus: Corpus) -> "Bm25":
        return cls(corpus, bm25s.BM25.load(str(folder), mmap=True))

    def save(self, folder: Path) -> None:
        self._scores.save(str(folder), show_progress=False)

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        k = min(k, len(self.corpus))
        found: list[list[Hit]] = []
        for words in _words(list(queries), ids=False):
            known = [word for word in words if word in self._scores.vocab_dict]
            if not known:
                found.append([])
                continue
            scores = self._scores.get_scores(known)
            # Of equal scores the first passages, however many are asked for: bm25s's own choice would depend on k.
            near = np.flatnonzero((scores > 0) & (scores >= np.partition(scores, -k)[-k]))
            best = near[np.lexsort((near, -scores[near]))][:k]
            found.append([Hit(self.corpus[number], float(scores[number])) for number in best.tolist()])
        return found


def _words(texts: list[str], ids: bool) -> Any:
    # A stemmer of each call's own: it keeps state, and slots search on several threads.
    stem = Stemmer.Stemmer("english")
    return bm25s.tokenize(texts, stopwords="en", stemmer=stem, return_ids=ids, show_progress=False)


class Dense:
    """Cosine similarity of a sentence-transformers model's vectors, float32 of shape (passages, dimensions).

    Args:
        encode: texts to unit vectors; the model's, unless a test brings its own.
    """

    kind = "dense"

    def __init__(self, corpus: Corpus, vectors: NDArray[np.float32], model: str, encode: Any = None) -> None:
        self.corpus, self._vectors, self.model = corpus, vectors, model
        self._encode = encode or _encoder(model)

    @classmethod
    def build(cls, corpus: Corpus, model: str, encode: Any = None) -> "Dense":
        encode = encode or _encoder(model)
        before = "passage: " if _is_e5(model) else ""
        vectors = np.asarray(encode([before + one.contents for one in corpus]), np.float32)
        return cls(corpus, vectors, model, encode)

    @classmethod
    def load(cls, folder: Path, corpus: Corpus, model: str) -> "Dense":
        return cls(corpus, np.load(folder / "vectors.npy", mmap_mode="r"), model)

    def save(self, folder: Path) -> None:
        folder.mkdir()
        np.save(folder / "vectors.npy", self._vectors)

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        k = min(k, len(self.corpus))
        before = "query: " if _is_e5(self.model) else ""
        asked = np.asarray(self._encode([before + query for query in queries]), np.float32)
        scores = np.full((len(queries), 0), 0, np.float32)
        numbers = np.full((len(queries), 0), 0, np.int64)
        for start in range(0, len(self.corpus), BLOCK):  # the best of each block, then of all: scores stay small
            block = asked @ self._vectors[start : start + BLOCK].T
            best = np.argpartition(-block, min(k, block.shape[1]) - 1, axis=1)[:, :k]
            scores = np.concatenate((scores, np.take_along_axis(block, best, 1)), 1)
            numbers = np.concatenate((numbers, best + start), 1)
        ranked = [np.lexsort((ids, -row))[:k] for row, ids in zip(scores, numbers, strict=True)]
        return [
            [Hit(self.corpus[int(numbers[i, n])], float(scores[i, n])) for n in order] for i, order in enumerate(ranked)
        ]


def _is_e5(model: str) -> bool:
    """E5's models were trained with a word before queries and passages."""
    return "e5" in Path(model).name.lower()


def _encoder(model: str) -> Any:
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise ImportError(
            "dense retrieval needs sentence-transformers; install it with: pip install 'asyncrl[dense]'"
        ) from error
    loaded = SentenceTransformer(model)
    return lambda texts: loaded.encode(texts, normalize_embeddings=True, show_progress_bar=len(texts) > 1000)


def build(source: Path, folder: Path, dense: str | None = None) -> Bm25 | Dense:
    """Index a corpus into a new folder, with a copy of the corpus.

    Args:
        dense: a sentence-transformers model, by folder or name; None makes BM25.

    Raises:
        ValueError: the folder is there already, or the corpus is damaged.
    """
    if folder.exists():
        raise ValueError(f"index {folder}: exists already; name a new folder")
    corpus = Corpus(source)
    made = Bm25.build(corpus) if dense is None else Dense.build(corpus, dense)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    shutil.copyfile(source, partial / "corpus.jsonl")
    np.save(partial / "starts.npy", corpus.starts)
    made.save(partial / made.kind)
    what = {"kind": made.kind, "model": dense, "passages": len(corpus), "bytes": source.stat().st_size}
    (partial / DESCRIPTION).write_text(json.dumps(what))
    partial.rename(folder)
    return made


def open_index(where: Path) -> Bm25 | Dense:
    """The index of a folder, or of a corpus file that is small enough to be indexed on the spot.

    Raises:
        ValueError: missing, damaged, or a corpus that is too large for that.
    """
    remedy = f"make it with: python -m envs.searchqa.index CORPUS.jsonl {where}"
    if where.is_file():
        if where.stat().st_size > MADE_ON_THE_SPOT:
            raise ValueError(
                f"corpus {where}: larger than {MADE_ON_THE_SPOT / 2**20:.0f} MiB, so it wants an index; make one with: "
                f"python -m envs.searchqa.index {where} INDEX, and name its folder instead"
            )
        return Bm25.build(Corpus(where))
    if not (where / DESCRIPTION).is_file():
        raise ValueError(f"index {where / DESCRIPTION}: missing; {remedy}")
    try:
        what = json.loads((where / DESCRIPTION).read_text())
        corpus = Corpus(where / "corpus.jsonl", np.load(where / "starts.npy"))
        if (len(corpus), corpus.path.stat().st_size) != (what["passages"], what["bytes"]):
            raise ValueError(f"{corpus.path} is not the corpus that was indexed")
        if what["kind"] == Dense.kind:
            return Dense.load(where / Dense.kind, corpus, what["model"])
        return Bm25.load(where / Bm25.kind, corpus)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"index {where}: damaged ({error}); {remedy} after removing it") from error


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m envs.searchqa.index", description="Index a corpus of passages.")
    parser.add_argument("corpus", type=Path, help="JSON lines of {id, contents} or {id, title, text}")
    parser.add_argument("folder", type=Path, help="folder to make")
    parser.add_argument("--dense", metavar="MODEL", help="a sentence-transformers model instead of BM25")
    given = parser.parse_args(arguments)
    try:
        made = build(given.corpus, given.folder, given.dense)
    except (ValueError, ImportError) as error:
        parser.error(str(error))
    sys.stdout.write(f"{len(made.corpus)} passages indexed ({made.kind}): {given.folder}\n")


if __name__ == "__main__":
    main()
