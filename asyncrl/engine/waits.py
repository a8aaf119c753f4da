"""Waiting with a bound, and the one clock. Invariant: a wait that runs out says for what, and what field gives more."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


def now() -> float:
    """Seconds by the running loop's clock, which waits end by too: all durations of a run are measured with it."""
    return asyncio.get_running_loop().time()


@asynccontextmanager
async def bounded(seconds: float, what: str, field: str = "") -> AsyncIterator[None]:
    """Raises TimeoutError with a sentence when the block takes longer than ``seconds``."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        hint = f"; raise {field} if that is too short" if field else ""
        raise TimeoutError(str(error) or f"{what} took longer than {seconds:g} s{hint}") from error
