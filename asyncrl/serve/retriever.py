"""The retriever as a service on Ray Serve, with the HTTP interface of Search-R1's retrieval server.

Invariants: queries that wait at the same moment (5 ms), of whatever requests, are searched as one batch; a query that a
replica found lately is not searched again; replicas come and go with the number of waiting requests. A request that
asks for too much or something else gets status 422 and a reason, never an empty result.
"""

import asyncio
import logging
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import ray
from cachetools import LRUCache
from fastapi import FastAPI
from pydantic import BaseModel, Field
from ray import serve
from ray.serve.exceptions import RayServeException

from envs.searchqa.index import Hit, open_index

REMEMBERED = 50_000
http = FastAPI(title="retriever")


class Query(BaseModel):
    """What is asked, as Search-R1's clients do."""

    queries: list[Annotated[str, Field(max_length=10_000)]] = Field(max_length=1024)
    topk: int = Field(3, ge=1, le=100)
    return_scores: bool = False


def _told(hit: Hit, with_score: bool) -> dict[str, Any]:
    # Stands before the service: its application is pickled where it is defined, with what is known by then.
    document = hit.passage._asdict()
    return {"document": document, "score": hit.score} if with_score else document


@serve.deployment(max_ongoing_requests=256, logging_config={"enable_access_log": False})
@serve.ingress(http)
class RetrieverService:
    def __init__(self, where: str) -> None:
        self._index = open_index(Path(where))
        self._known: LRUCache[tuple[str, int], list[Hit]] = LRUCache(REMEMBERED)

    @http.post("/retrieve")
    async def retrieve(self, asked: Query) -> dict[str, Any]:
        found = await asyncio.gather(*(self._find(query, asked.topk) for query in asked.queries))
        return {"result": [[_told(hit, asked.return_scores) for hit in hits] for hits in found]}

    async def _find(self, query: str, k: int) -> list[Hit]:
        key = query, k
        if key not in self._known:
            self._known[key] = await self._search(key)
        return self._known[key]

    @serve.batch(max_batch_size=64, batch_wait_timeout_s=0.005)
    async def _search(self, asked: list[tuple[str, int]]) -> list[list[Hit]]:
        most = max(k for _, k in asked)
        # Beside the event loop, which goes on collecting the next batch.
        found = await asyncio.to_thread(self._index.search, [query for query, _ in asked], most)
        return [hits[:k] for hits, (_, k) in zip(found, asked, strict=True)]


def start(where: Path, host: str, port: int, replicas: int, gpus: float = 0) -> str:
    """Serve an index folder or corpus file on this Ray cluster, with up to ``replicas`` replicas; gives the address."""
    serve.start(http_options={"host": host, "port": port})
    scaled = RetrieverService.options(  # type: ignore[attr-defined]  # a deployment, which the decorators' types hide
        autoscaling_config={"min_replicas": 1, "max_replicas": replicas, "target_ongoing_requests": 32},
        ray_actor_options={"num_cpus": 1, "num_gpus": gpus},
    )
    serve.run(scaled.bind(str(where.resolve())), name="retriever", route_prefix="/")
    return f"http://{host}:{port}"


def run(where: Path, host: str, port: int, replicas: int, gpus: float = 0) -> None:
    """:func:`start`, until interrupted. Raises ValueError: the index is missing or damaged."""
    open_index(where)  # a mistake is told here, not by a replica that is started again and again
    ray.init(os.environ.get("RAY_ADDRESS", "local"), logging_level=logging.ERROR)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Ray's own handler would skip the way out below
    try:
        print(f"retriever: {start(where, host, port, replicas, gpus)}/retrieve", flush=True)  # noqa: T201
        while True:
            time.sleep(3600)
    finally:
        with suppress(RayServeException):  # it never came up
            serve.delete("retriever")
            if not serve.status().applications:  # the cluster may have others
                serve.shutdown()
        ray.shutdown()
