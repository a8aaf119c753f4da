"""The front end's side of measured turns: what the engine process keeps of a turn is fetched once, or dropped.

Invariants: a name belongs to one submission; one call fetches at a time, and the turns that end meanwhile are fetched
together by the next; whoever waits for a report may be cancelled without harm to the others.
"""

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from typing import Any

from asyncrl.types import Signals

log = logging.getLogger(__name__)

TURN = "turn"
"""In ``SamplingParams.extra_args``, the turn's name; unique to a submission, or a turn that is withdrawn and submitted
anew would be taken with what is left of the first."""

Report = tuple[list[float], Signals | None]
"""Log-probs and signals: :class:`asyncrl.engine.thinking.Report`, as it arrives."""


COLLECT_S = 0.01
"""Between two calls for reports that are on their way: a call takes the engine's time, a turn lasts far longer."""


class Reports:
    def __init__(self) -> None:
        self._ended: dict[str, int] = {}
        """Turns to ask for: name and number of tokens."""
        self._awaited: dict[str, asyncio.Future[Report]] = {}
        self._fetching = False
        self._calls: set[asyncio.Task[None]] = set()

    async def take(self, llm: Any, name: str, length: int) -> Report:
        """The report of a turn that has ended with ``length`` tokens; the engine forgets it.

        Raises:
            RuntimeError: the engine does not know the turn, or does not answer.
        """
        self._ended[name] = length
        report = self._awaited[name] = asyncio.get_running_loop().create_future()
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
            while self._awaited:
                ended, self._ended = self._ended, {}
                try:
                    (found,) = await llm.collective_rpc("take_turns", args=(ended,))
                except Exception as error:
                    self._fail(self._awaited.keys() - self._ended, repr(error))
                    continue
                for name, row in found.items():
                    if row is None:
                        self._fail([name], "it does not know the turn")
                    elif (report := self._awaited.pop(name, None)) and not report.done():
                        logprobs, signals = row
                        report.set_result((logprobs, signals and Signals(*signals)))
                if self._awaited and not self._ended:
                    await asyncio.sleep(COLLECT_S)
        finally:
            self._fetching = False

    def _fail(self, names: Iterable[str], why: str) -> None:
        for name in names:
            if (report := self._awaited.pop(name, None)) and not report.done():
                report.set_exception(RuntimeError(f"the engine reported nothing of turn {name}: {why}"))

    def _begin(self, call: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)


async def _drop(llm: Any, name: str) -> None:
    try:
        await llm.collective_rpc("drop_turns", args=([name],))
    except Exception as error:  # the engine ends, and what it keeps of its turns with it
        log.debug("turn %s is not dropped: %r", name, error)
