"""A generator without a model: it answers from a script.

Invariants: the methods keep the promises of those of :class:`asyncrl.engine.generator.Generator`, publishing, pausing
and fencing included; the same seed and key give the same answer, whatever else runs beside it. A transfer fails where a
subclass lets it.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from itertools import groupby
from typing import Any

from asyncrl.engine.state import Counters, Gate
from asyncrl.types import Generation, Sampling, VersionSpan, token_digest

LOGPROB = -1.0
"""Log-prob of every token, in ``generate`` and ``score`` alike."""

Script = Callable[[Sequence[int], Sampling, str, int, random.Random], Sequence[int]]
"""(prompt ids, sampling, key, version at admission, random source of this key) -> response ids, end token included."""
Delay = Callable[[random.Random], float]
"""Draws the seconds one token takes."""


class ScriptedEngine:
    def __init__(
        self,
        script: Script,
        seed: int = 0,
        delay: Delay | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """
        Args:
            delay: seconds a token, drawn anew for each; None answers at once.
            sleep: waits; a virtual clock's in simulations.
        """
        self._script = script
        self._seed = seed
        self._delay = delay
        self._sleep = sleep
        self._gate = Gate("scripted engine")
        self._counters = Counters()

    async def start(self) -> None:
        """Nothing to load."""
        self._counters.book()

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, key: str) -> Generation:
        self._counters.book(come=1)
        try:
            return await self._generate(prompt_ids, sampling, key)
        finally:
            self._counters.book(come=-1)

    async def _generate(self, prompt_ids: Sequence[int], sampling: Sampling, key: str) -> Generation:
        await self._gate.passed()
        source = random.Random(f"{self._seed}/{key}")
        script = tuple(self._script(prompt_ids, sampling, key, self._gate.version, source))
        tokens = script[: sampling.max_tokens]
        if not tokens:
            raise ValueError(f"script gave no token for turn {key}: a response holds at least its end token")
        versions, seconds = [], 0.0
        for _ in tokens:
            if self._delay is not None:
                pace = self._delay(source)
                seconds += pace
                await self._sleep(pace)
                await self._gate.passed()
            versions.append(self._gate.version)
        self._counters.book(requests=1, prompt_tokens=len(prompt_ids), tokens_generated=len(tokens))
        finish = "length" if len(script) > sampling.max_tokens else "stop"
        return Generation(
            token_ids=tokens,
            logprobs=(LOGPROB,) * len(tokens),
            spans=_spans(versions),
            finish=finish,
            digest=token_digest(tokens),
            seconds=seconds,
        )

    async def score(self, ids: Sequence[int], start: int) -> list[float]:
        self._gate.check()
        return [LOGPROB] * (len(ids) - start)

    async def pause(self) -> None:
        self._counters.book(paused=True)
        self._gate.close()

    async def resume(self, version: str) -> None:
        self._counters.book(paused=False)
        self._gate.open(version)

    async def init_weight_transfer_engine(self, request: dict[str, Any]) -> None:
        """Any transport will do: the weights are not looked at."""

    async def start_weight_update(self, round: int) -> None:
        self._gate.overwrite(round)

    async def update_weights(self, round: int, request: dict[str, Any]) -> None:
        self._gate.check_round(round)

    async def finish_weight_update(self, round: int) -> None:
        self._gate.check_round(round)

    async def update_weight_version(self, version: str) -> None:
        self._gate.version = int(version)

    async def stats(self) -> dict[str, float]:
        return self._counters.book()

    async def shutdown(self) -> None:
        """Nothing to end."""


def _spans(versions: Sequence[int]) -> tuple[VersionSpan, ...]:
    spans: list[VersionSpan] = []
    start = 0
    for version, run in groupby(versions):
        end = start + sum(1 for _ in run)
        spans.append(VersionSpan(version, start, end))
        start = end
    return tuple(spans)
