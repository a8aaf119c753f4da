"""The sink protocol and the tracker, the one writer of a run's measurements.

Invariants:

* ``step`` counts records and never goes back, over a resume either; ``version`` does at a resume from a checkpoint.
* A sink that fails never stops training: it is reported once and gets nothing more.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol, Self

import numpy as np

logger = logging.getLogger(__name__)

Metrics = Mapping[str, float]
Histograms = Mapping[str, Sequence[float]]

MAX_EXACT = 64
"""Distinct values up to which a histogram is kept exactly; lags are small integers and stay far below."""


class Sink(Protocol):
    def log(self, step: int, version: int, metrics: Metrics, histograms: Histograms) -> None:
        """Record numbers by name, and lists of numbers by name, of policy ``version``."""

    def close(self) -> None:
        """Flush and release; called once."""


class Tracker:
    """Fans each record out to every sink that still works."""

    def __init__(self, sinks: Sequence[Sink], step: int = 0) -> None:
        self._sinks = list(sinks)
        self.step = step
        """Of the next record."""

    def log(self, version: int, metrics: Metrics, histograms: Histograms | None = None) -> None:
        """Record measurements of policy ``version``; each call is a step of its own."""
        for sink in list(self._sinks):
            try:
                sink.log(self.step, version, metrics, histograms or {})
            except Exception:
                logger.exception("%s failed at step %d and is left out from here on", type(sink).__name__, self.step)
                self._sinks.remove(sink)
        self.step += 1

    def close(self) -> None:
        """Close every sink; idempotent."""
        while self._sinks:
            sink = self._sinks.pop()
            try:
                sink.close()
            except Exception:
                logger.exception("%s did not close cleanly", type(sink).__name__)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def bin_values(values: Sequence[float]) -> dict[str, list[float]]:
    """Counts of ``values`` as plain lists.

    Returns ``{"values": distinct, "counts": ...}`` while there are at most ``MAX_EXACT`` distinct values, else
    ``{"edges": n + 1 of them, "counts": n}`` over equal bins.
    """
    numbers = np.asarray(values, dtype=np.float64)
    distinct, counts = np.unique(numbers, return_counts=True)
    if len(distinct) <= MAX_EXACT:
        return {"values": distinct.tolist(), "counts": counts.tolist()}
    counts, edges = np.histogram(numbers, bins=MAX_EXACT)
    return {"edges": edges.tolist(), "counts": counts.tolist()}
