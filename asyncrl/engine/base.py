"""What both ends of a call to a generator know: how it fails, and how much of the weights moves at once."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

BUCKET_BYTES = 256 * 2**20
"""Weights gathered from shards, or sent over the CPU, together: bounds what both take beyond the weights themselves."""

Item = TypeVar("Item")


class EngineDied(RuntimeError):
    """The engine process of a living generator has ended: no call will succeed again."""


class EngineFenced(RuntimeError):
    """The engine does not hold the current weights whole: it answers nothing until a publish has refitted it."""


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
