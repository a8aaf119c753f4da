"""What every kind of engine keeps about itself: whether it may be sampled from, and what it has counted."""

import asyncio

from asyncrl.engine.base import EngineFenced
from asyncrl.engine.waits import now

UNKNOWN = -1
"""The version from the start of a transfer until its label: weights are overwritten in place."""


class Gate:
    """Closed, nothing passes. It opens only on weights of the version that is to be served; otherwise the engine is
    fenced, and whoever waits or comes is told so, until a later publish opens it."""

    def __init__(self, name: str) -> None:
        self.version = 0
        self._name = name
        self._fenced = False
        self._round = 0
        self._opened = asyncio.Event()
        self._opened.set()

    def close(self) -> None:
        self._opened.clear()

    def overwrite(self, round: int) -> None:
        """Round ``round`` of transfers overwrites the weights from now on."""
        self.version, self._round = UNKNOWN, round

    def check_round(self, round: int) -> None:
        """Raises RuntimeError when another round has begun: what belongs to ``round`` came late."""
        if round != self._round:
            raise RuntimeError(f"{self._name}: a call of transfer round {round} came when that was over")

    def open(self, version: str) -> None:
        """Raises EngineFenced."""
        self._fenced = self.version != int(version)
        self._opened.set()  # those who wait learn of a fence too
        self.check()

    async def passed(self) -> None:
        """Wait until it is open. Raises EngineFenced."""
        await self._opened.wait()
        self.check()

    def check(self) -> None:
        if self._fenced:
            raise EngineFenced(f"{self._name}: the last publish did not reach it; fenced until the next one")


class Counters:
    """``tokens_generated``, ``prompt_tokens``, ``cached_prompt_tokens`` and ``requests`` (turns) served; by the running
    loop's clock the ``seconds`` since start, of them ``idle_s`` without a request and ``paused_s``."""

    def __init__(self) -> None:
        served = "tokens_generated", "prompt_tokens", "cached_prompt_tokens", "requests"
        self._totals = dict.fromkeys((*served, "seconds", "idle_s", "paused_s"), 0.0)
        self._until: float | None = None
        self._present, self._paused = 0, False

    def book(self, come: int = 0, paused: bool | None = None, **served: float) -> dict[str, float]:
        """Count up to now, then note who comes (or goes: negative), a pause or its end; returns all totals."""
        at = now()
        passed, self._until = at - (at if self._until is None else self._until), at
        times = {"seconds": passed, "idle_s": passed * (not self._present), "paused_s": passed * self._paused}
        for name, more in (times | served).items():
            self._totals[name] += more
        self._present += come
        self._paused = self._paused if paused is None else paused
        return dict(self._totals)
