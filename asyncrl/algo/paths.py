"""A group of chains or trees as arrays, and what group-relative advantages have in common.

The population of their statistics is the *step rows* of a group (SPARK, arXiv 2601.20209, tree-based policy update; the
releases of GRPO and GiGPO for agents): one row for each turn of each root-to-leaf path, so a turn shared by k leaves is
k rows, each with its own leaf's return.

Invariants:

* Deduplication is exact. The clipped loss is linear in A on either side of zero, so a shared turn trained once with
  ``positive = sum max(A, 0)``, ``negative = sum min(A, 0)`` over its leaves and ``copies`` = number of leaves has the
  loss and gradient of its copies, provided that KL, entropy and token counts are weighted by ``copies``.
* Equal scores give advantages of exactly 0: what lies within float noise of the mean is the mean, and a std within
  noise of 0 counts as 1, so noise is never divided by noise.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.algo import AlgoConfig

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]

EPSILON = 1e-6
NOISE = 1e-9
"""Relative size below which a difference of scores is float noise."""


@dataclass(frozen=True, slots=True)
class Paths:
    """A group's n turns and L leaves as arrays.

    Raises ValueError: shapes disagree, a parent does not precede its child, or a turn lies under no leaf.
    """

    parent: Ints
    """(n,) index of each turn's parent, which precedes it; -1 at roots."""
    end: Ints
    """(L,) index of each leaf's last turn."""
    returns: Floats
    """(L,) terminal reward R of each leaf."""
    in_order: NDArray[np.bool_]
    """(n,) whether the turn is spared the penalty (``algo.penalty_on``)."""
    trained: NDArray[np.bool_]
    """(L,) whether the leaf's path is in the loss; its return is in the statistics in any case."""
    anchors: Sequence[str]
    """(n,) keys of the states that the turns were taken in."""

    def __post_init__(self) -> None:
        n, leaves = len(self.parent), len(self.end)
        shapes = self.in_order.shape, (len(self.anchors),), self.returns.shape, self.trained.shape
        if shapes != ((n,), (n,), (leaves,), (leaves,)):
            raise ValueError(
                f"paths: in_order and anchors must be ({n},) as parent is, returns and trained ({leaves},) as end is, "
                f"got {shapes}"
            )
        if np.any(self.parent >= np.arange(n)) or np.any(self.parent < -1):
            raise ValueError("paths: every parent must be -1 or the index of an earlier turn")
        if np.any(self.end < 0) or np.any(self.end >= n):
            raise ValueError(f"paths: every leaf must end at a turn 0..{n - 1}")
        if (bare := np.flatnonzero(np.bincount(self.rows().turn, minlength=n) == 0)).size:
            raise ValueError(f"paths: turns {bare.tolist()} lie under no leaf")

    def rows(self) -> "Rows":
        """The step rows."""
        rows, parent = [], self.parent.tolist()
        for leaf, turn in enumerate(self.end.tolist()):
            ahead = 0
            while turn >= 0:
                rows.append((turn, leaf, ahead))
                turn, ahead = parent[turn], ahead + 1
        return Rows(*np.array(rows, dtype=np.int64).reshape(-1, 3).T)


class Rows(NamedTuple):
    """Step rows, as index arrays of one length."""

    turn: Ints
    leaf: Ints
    ahead: Ints
    """Turns between this one and the leaf's last."""


@dataclass(frozen=True, slots=True)
class Credit:
    """Per-turn advantages in deduplicated form; each array has shape (n,). A turn with 0 copies is not trained."""

    positive: Floats
    negative: Floats
    copies: Ints


class Scored(NamedTuple):
    """Step rows with what they are judged by, as arrays of one length."""

    turn: Ints
    value: Floats
    trained: NDArray[np.bool_]
    penalty: Floats
    """To be subtracted: that of a turn which is not in order."""

    @classmethod
    def of(cls, paths: Paths, algo: AlgoConfig, discount: float = 1.0) -> Self:
        """The rows by their leaves' returns, discounted by the turns ahead; with ``prefix: mean`` one row a turn, by
        its mean over the leaves."""
        turn, leaf, ahead = paths.rows()
        value, trained = paths.returns[leaf] * discount**ahead, paths.trained[leaf]
        if algo.prefix == "mean":
            n = len(paths.parent)
            value, trained = sum_by(turn, value, n) / np.bincount(turn), np.bincount(turn[trained], minlength=n) > 0
            turn = np.arange(n)
        penalty = algo.invalid_penalty * (~paths.in_order[turn]).astype(np.float64)
        return cls(turn, value, trained, penalty)

    def credit(self, advantage: Floats, n: int) -> Credit:
        """Of ``n`` turns, from the rows' advantages."""
        advantage = advantage * self.trained
        return Credit(
            positive=sum_by(self.turn, np.maximum(advantage, 0), n),
            negative=sum_by(self.turn, np.minimum(advantage, 0), n),
            copies=np.bincount(self.turn[self.trained], minlength=n),
        )


def sum_by(index: Ints, values: Floats, n: int) -> Floats:
    return np.bincount(index, values, n).astype(np.float64)


def standardise(score: Floats, population: Floats, divide: bool) -> Floats:
    """``score`` by mean and unbiased std of ``population``; a population of one has mean 0 and std 1."""
    alone = population.size <= 1
    mean = 0.0 if alone else population.mean()
    noise = NOISE * max(1.0, float(np.abs(population).max(initial=0.0)))
    deviation = score - mean
    deviation[np.abs(deviation) <= noise] = 0.0
    if not divide:
        return deviation
    std = 1.0 if alone else float(population.std(ddof=1))
    return deviation / ((std if std > noise else 1.0) + EPSILON)
