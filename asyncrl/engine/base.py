"""What the rest of the system knows of a generator.

A generator is a Ray actor holding one engine; its methods are awaited through the actor handle. Token ids go in and
come out; text never crosses this line. Versions are integers, 0 at start, and only a completed publish changes them:

    pause() -> [learner ranks: start_weight_update, update_weights ..., finish_weight_update] ->
    update_weight_version(str(version)) -> resume(str(version))

Requests that have a token are kept over a pause, others start anew after it; ``resume`` is called whether or not the
transfer succeeded, with the version that is to be served from then on. The calls of a transfer carry the number of
their round: one that comes when its round is over changes nothing.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from asyncrl.types import Generation, Sampling

BUCKET_BYTES = 256 * 2**20
"""Weights gathered from shards, or sent over the CPU, together: bounds what both take beyond the weights themselves."""

Item = TypeVar("Item")


class EngineDied(RuntimeError):
    """The engine process of a living generator has ended: no call will succeed again."""


class EngineFenced(RuntimeError):
    """The engine does not hold the current weights whole: it answers nothing until a publish has refitted it."""


class Engine(Protocol):
    async def start(self) -> None:
        """Load the model; returns when requests can be served."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, key: str) -> Generation:
        """One turn. ``key`` is the turn's own id; state inside the engine is kept under it.

        Raises:
            EngineDied: here and in any other call that needs the engine.
            EngineFenced: see there; before or during the request.
        """

    async def score(self, ids: Sequence[int], start: int) -> list[float]:
        """Log-probs at temperature 1 of ``ids[start:]``, each given what precedes it, under the current weights.

        ``start`` is at least 1: nothing precedes the first token.
        """

    async def pause(self) -> None:
        """Freeze generation; requests in flight are kept."""

    async def resume(self, version: str) -> None:
        """Generation goes on.

        Raises EngineFenced: the weights in place are not a complete ``version``; from now on requests fail with it.
        """

    async def init_weight_transfer_engine(self, request: dict[str, Any]) -> None:
        """Meet a sender, whatever an earlier one has left behind."""

    async def start_weight_update(self, round: int) -> None:
        """Begin round ``round`` of transfers; the one before is over."""

    async def update_weights(self, round: int, request: dict[str, Any]) -> None: ...

    async def finish_weight_update(self, round: int) -> None: ...

    async def update_weight_version(self, version: str) -> None:
        """Label the weights now in place; the prefix cache's salt follows."""

    async def stats(self) -> dict[str, float]:
        """Counters since start: see :class:`asyncrl.engine.state.Counters`."""

    async def shutdown(self) -> None:
        """End the engine and its child processes."""


def cause_of(error: Exception) -> object:
    """What went wrong in an actor, without the remote traceback that Ray puts into its message."""
    return getattr(error, "cause", None) or error


def brief(error: Exception) -> str:
    """The first line of :func:`cause_of`, without its full stop."""
    return str(cause_of(error)).partition("\n")[0].rstrip(".")


def buckets(items: Iterable[Item], nbytes_of: Callable[[Item], int], limit: int) -> Iterator[list[Item]]:
    """Consecutive ``items`` in lists of at most ``limit`` bytes; a larger item comes alone."""
    bucket: list[Item] = []
    held = 0
    for item in items:
        nbytes = nbytes_of(item)
        if bucket and held + nbytes > limit:
            yield bucket
            bucket, held = [], 0
        bucket.append(item)
        held += nbytes
    if bucket:
        yield bucket
