"""The front end's side of measured turns: what the engine process keeps of a turn is fetched once, or dropped.

Invariants: a name belongs to one submission; one call fetches at a time, and the turns that end meanwhile are fetched
together by the next; whoever waits for a report may be cancelled without harm to the others.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from asyncrl.types import Signals

log = logging.getLogger(__name__)

TURN = "turn"
"""In ``SamplingParams.extra_args``, the turn's name; unique to a submission, or a turn that is withdrawn and submitted
anew would be taken with what is left of the first."""

Report = tuple[list[float], Signals | None]
"""Log-probs and signals: :class:`asyncrl.engine.thinking.Report`, as it arrives."""
Waiting = dict[str, tuple[int, asyncio.Future[Report]]]
"""By a turn's name: its number of tokens, and where the report goes."""


class Reports:
    def __init__(self) -> None:
        self._waiting: Waiting = {}
        self._fetching = False
        self._calls: set[asyncio.Task[None]] = set()

    async def take(self, llm: Any, name: str, length: int) -> Report:
        """The report of a turn that has ended with ``length`` tokens; the engine forgets it.

        Raises:
            RuntimeError: the engine does not know the turn, or does not answer.
        """
        report: asyncio.Future[Report] = asyncio.get_running_loop().create_future()
        self._waiting[name] = length, report
        if not self._fetching:
            self._fetching = True
            self._begin(self._fetch(llm))
        return await report

    def drop(self, llm: Any, name: str) -> None:
        """Have the engine forget a turn that was withdrawn, aborted already."""
        self._begin(_drop(llm, name))

    async def _fetch(self, llm: Any) -> None:
        await asyncio.sleep(0)  # others end in this pass of the event loop
        try:
            while self._waiting:
                waiting, self._waiting = self._waiting, {}
                await _deliver(llm, waiting)
        finally:
            self._fetching = False

    def _begin(self, call: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)


async def _deliver(llm: Any, waiting: Waiting) -> None:
    lengths, why = {name: length for name, (length, _) in waiting.items()}, "it does not know the turn"
    try:
        (rows,) = await llm.collective_rpc("take_turns", args=(lengths,))
    except Exception as error:
        rows, why = [None] * len(waiting), repr(error)
    for (name, (_, report)), row in zip(waiting.items(), rows, strict=True):
        if report.done():
            continue
        if row is None:
            report.set_exception(RuntimeError(f"the engine reported nothing of turn {name}: {why}"))
        else:
            logprobs, signals = row
            report.set_result((logprobs, signals and Signals(*signals)))


async def _drop(llm: Any, name: str) -> None:
    try:
        await llm.collective_rpc("drop_turns", args=([name],))
    except Exception as error:  # the engine ends, and what it keeps of its turns with it
        log.debug("turn %s is not dropped: %r", name, error)
