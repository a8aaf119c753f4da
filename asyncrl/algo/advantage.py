"""Group-relative advantages of turns, over chains and trees, as pure functions of arrays.

The population of SPARK's statistics (arXiv 2601.20209, tree-based policy update; GRPO's normalisation, arXiv
2402.03300, section 4.1) is the *step rows* of a group: one row for each turn of each root-to-leaf path, so a turn
shared by k leaves is k rows, each with its own leaf's return::

    s[leaf, turn] = R(leaf) - penalty * [turn not in order]
    A[leaf, turn] = (s - mean) / (std + 1e-6)         std unbiased; a population of one: mean 0, std 1

Invariants:

* Deduplication is exact. The clipped loss is linear in A on either side of zero, so a shared turn trained once with
  ``positive = sum max(A, 0)``, ``negative = sum min(A, 0)`` over its leaves and ``copies`` = number of leaves has the
  loss and gradient of its copies, provided that KL, entropy and token counts are weighted by ``copies``.
* Equal scores give advantages of exactly 0: what lies within float noise of the mean is the mean, and a std within
  noise of 0 counts as 1, so noise is never divided by noise.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

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
    valid: NDArray[np.bool_]
    """(n,) whether the turn's output kept the format."""
    trained: NDArray[np.bool_]
    """(L,) whether the leaf's path is in the loss; its return is in the statistics in any case."""

    def __post_init__(self) -> None:
        n, leaves = len(self.parent), len(self.end)
        shapes = self.valid.shape, self.returns.shape, self.trained.shape
        if shapes != ((n,), (leaves,), (leaves,)):
            raise ValueError(
                f"paths: valid must be ({n},) as parent is, returns and trained ({leaves},) as end is, got {shapes}"
            )
        if np.any(self.parent >= np.arange(n)) or np.any(self.parent < -1):
            raise ValueError("paths: every parent must be -1 or the index of an earlier turn")
        if np.any(self.end < 0) or np.any(self.end >= n):
            raise ValueError(f"paths: every leaf must end at a turn 0..{n - 1}")
        if (bare := np.flatnonzero(np.bincount(self.rows()[0], minlength=n) == 0)).size:
            raise ValueError(f"paths: turns {bare.tolist()} lie under no leaf")

    def rows(self) -> tuple[Ints, Ints]:
        """The step rows as (turn, leaf) index arrays, both of shape (rows,)."""
        turns, leaves, parent = [], [], self.parent.tolist()
        for leaf, turn in enumerate(self.end.tolist()):
            while turn >= 0:
                turns.append(turn)
                leaves.append(leaf)
                turn = parent[turn]
        return np.array(turns, dtype=np.int64), np.array(leaves, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Credit:
    """Per-turn advantages in deduplicated form; each array has shape (n,). A turn with 0 copies is not trained."""

    positive: Floats
    negative: Floats
    copies: Ints


AdvantageFn: TypeAlias = Callable[[Paths, AlgoConfig], Credit]


def spark(paths: Paths, algo: AlgoConfig) -> Credit:
    """SPARK's tree advantage, with the choices of ``algo``:

    * ``statistics``, the population of mean and std: ``steps`` = the rows themselves, ``trajectories`` = the leaves'
      returns, without penalties;
    * ``normalise``: ``mean`` leaves the division by the std out;
    * ``prefix``: ``duplicate`` = one row for each leaf under a turn; ``mean`` = one row a turn, whose return is the
      mean over its leaves (then ``copies`` is at most 1).
    """
    turn, leaf = paths.rows()
    n = len(paths.parent)
    returns, trained = paths.returns[leaf], paths.trained[leaf]
    if algo.prefix == "mean":
        returns, trained = _sum_by(turn, returns, n) / np.bincount(turn), np.bincount(turn[trained], minlength=n) > 0
        turn = np.arange(n)
    score = returns - algo.invalid_penalty * ~paths.valid[turn]
    population = score if algo.statistics == "steps" else paths.returns
    advantage = _standardise(score, population, divide=algo.normalise == "mean_std") * trained
    return Credit(
        positive=_sum_by(turn, np.maximum(advantage, 0), n),
        negative=_sum_by(turn, np.minimum(advantage, 0), n),
        copies=np.bincount(turn[trained], minlength=n),
    )


ADVANTAGES: dict[str, AdvantageFn] = {"spark": spark, "grpo": spark}
"""By the name used in ``algo.advantage``. Over chains both are one formula, and with ``grpo`` nothing else is grown."""


def _sum_by(index: Ints, values: Floats, n: int) -> Floats:
    return np.bincount(index, values, n).astype(np.float64)


def _standardise(score: Floats, population: Floats, divide: bool) -> Floats:
    alone = population.size <= 1
    mean = 0.0 if alone else population.mean()
    noise = NOISE * max(1.0, float(np.abs(population).max(initial=0.0)))
    deviation = score - mean
    deviation[np.abs(deviation) <= noise] = 0.0
    if not divide:
        return deviation
    std = 1.0 if alone else float(population.std(ddof=1))
    return deviation / ((std if std > noise else 1.0) + EPSILON)
