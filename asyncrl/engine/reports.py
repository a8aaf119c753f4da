"""The front end's side of measured turns: what the engine process keeps of a turn is fetched once, or dropped.

Invariants: a name belongs to one submission; turns that end together are fetched by one call; whoever waits for a
report may be cancelled without harm to the others.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

from asyncrl.types import Signals

TURN = "turn"
"""In ``SamplingParams.extra_args``, the turn's name; unique to a submission, or a turn that is withdrawn and submitted
anew would be taken with what is left of the first."""


Report = tuple[list[float], Signals]
"""Log-probs and signals: :class:`asyncrl.engine.thinking.Report`, as it arrives."""


class Reports:
    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[Report]] = {}
        self._calls: set[asyncio.Task[None]] = set()

    async def take(self, llm: Any, name: str) -> Report:
        """The report of a turn that has ended; the engine forgets it."""
        if not self._waiting:
            self._begin(self._fetch(llm))
        self._waiting[name] = asyncio.get_running_loop().create_future()
        return await self._waiting[name]

    def drop(self, llm: Any, name: str) -> None:
        """Have the engine forget a turn that was withdrawn, aborted already."""
        self._begin(_drop(llm, name))

    async def _fetch(self, llm: Any) -> None:
        await asyncio.sleep(0)  # others end in this pass of the event loop
        waiting, self._waiting = self._waiting, {}
        try:
            (rows,) = await llm.collective_rpc("take_turns", args=(list(waiting),))
            reports = [(logprobs, Signals(*signals)) for logprobs, signals in rows]
        except Exception as error:
            for one in waiting.values():
                if not one.done():
                    one.set_exception(RuntimeError(f"the engine did not report its turns: {error!r}"))
            return
        for one, report in zip(waiting.values(), reports, strict=True):
            if not one.done():
                one.set_result(report)

    def _begin(self, call: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)


async def _drop(llm: Any, name: str) -> None:
    if not llm.errored:
        await llm.collective_rpc("drop_turns", args=([name],))
