"""A retriever behind an HTTP address, and the one retriever that all slots of a process share.

Invariants: every request has a time limit and a bounded number of tries with growing pauses between them; a retriever
that is down, slow, or answers something else raises :class:`RetrieverDown`, which names its address and the remedy. It
is never an empty result, which an agent would be blamed for.

Source: the interface of Search-R1's retrieval server. POST {"queries": [...], "topk": 3, "return_scores": true} to
/retrieve gives {"result": [[{"document": {"id": ..., "contents": ...}, "score": ...}, ...], ...]}.
"""

import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import requests
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from envs.searchqa.index import Hit, Retriever, open_index
from envs.searchqa.passages import passage

REMEMBERED = 4096
"""Queries whose hits a process remembers: siblings of a tree ask alike."""
REMEDY = (
    "start one with: asyncrl serve retriever FOLDER, or name another with env.options.retriever or the variable "
    "ASYNCRL_RETRIEVER"
)


CORPUS = (
    "name a service's address, an index folder or a corpus file with the option 'retriever' or the variable "
    "ASYNCRL_RETRIEVER; the papers search Search-R1's wiki-18 (PeterJinGo/wiki-18-corpus on the Hugging Face Hub)"
)


class RetrieverDown(RuntimeError):
    """The retriever cannot be asked; the message names its address and what to do."""


class Service(NamedTuple):
    """Where a retriever is found, and how patient to be with it."""

    where: str
    """Address of a service (``http://host:port``), or an index folder, or a corpus file."""
    timeout_s: float = 10.0
    """Of one try."""
    retries: int = 3
    """Tries after the first; before the second and each later one it pauses 1, 2, 4 ... seconds."""

    @property
    def remote(self) -> bool:
        return self.where.startswith(("http://", "https://"))


class HttpRetriever:
    """A service with Search-R1's interface; its connections are kept and shared by threads."""

    def __init__(self, service: Service) -> None:
        self.url = service.where.rstrip("/")
        if not urlsplit(self.url).path:
            self.url += "/retrieve"
        self._timeout_s, self._session = service.timeout_s, requests.Session()
        retry = Retry(
            service.retries,
            backoff_factor=0.5,
            status_forcelist=(429, 500, 502, 503, 504),
            allowed_methods=None,  # asking twice does no harm, though it is a POST
            respect_retry_after_header=False,
        )
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, HTTPAdapter(pool_maxsize=64, max_retries=retry))

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        asked: dict[str, Any] = {"queries": list(queries), "topk": k, "return_scores": True}
        try:
            answer = self._session.post(self.url, json=asked, timeout=self._timeout_s)
            answer.raise_for_status()
            return _hits(answer.json(), len(queries))
        except requests.RequestException as error:
            raise RetrieverDown(f"retriever {self.url} does not answer ({_why(error)}); {REMEDY}") from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise RetrieverDown(
                f"retriever {self.url} does not answer as Search-R1's does ({error!r:.200}); {REMEDY}"
            ) from error


def _hits(answer: Any, queries: int) -> list[list[Hit]]:
    found = [[Hit(passage(one["document"]), float(one["score"])) for one in hits] for hits in answer["result"]]
    if len(found) != queries:
        raise ValueError(f"{len(found)} results for {queries} queries")
    return found


def _why(error: BaseException) -> str:
    """The innermost cause: requests and urllib3 wrap it several times over."""
    while isinstance(inner := getattr(error, "reason", None) or (error.args or [None])[0], BaseException):
        error = inner
    return f"{type(error).__name__}: {error}"[:300]


class Shared:
    """One retriever, with what it was asked lately remembered."""

    def __init__(self, retriever: Retriever) -> None:
        self.ask = lru_cache(maxsize=REMEMBERED)(lambda query, k: tuple(retriever.search([query], k)[0]))
        """(query, k) -> hits, the best first."""


def find_retriever(folder: Path, given: str | None = None) -> str:
    """What is searched: ``given``, else ``index`` or ``corpus.jsonl`` of a data folder; opens nothing. An empty text
    for ``given`` leaves the variable ASYNCRL_RETRIEVER out of it.

    Raises:
        ValueError: neither an address nor there.
    """
    local = folder / "index" if (folder / "index").is_dir() else folder / "corpus.jsonl"
    where = given or (os.environ.get("ASYNCRL_RETRIEVER") if given is None else None) or str(local)
    if not Service(where).remote and not Path(where).expanduser().exists():
        raise ValueError(f"searchqa: nothing to search: {where} is missing; {CORPUS}")
    return where


_opening = Lock()


def shared(service: Service) -> Shared:
    """The retriever of a service; the same object for every caller in a process, opened by the first.

    Raises:
        ValueError: an index or corpus is missing or damaged.
    """
    with _opening:
        return _open(service)


@lru_cache(maxsize=8)
def _open(service: Service) -> Shared:
    return Shared(HttpRetriever(service) if service.remote else open_index(Path(service.where).expanduser()))
