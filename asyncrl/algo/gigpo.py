"""GiGPO's advantage (arXiv 2505.10978, section 4), which is T2PO's too (arXiv 2605.02178): the group's, and beside it
that among the turns taken in one state::

    R[leaf, turn] = discount ** (turns ahead) * R(leaf) - penalty * [turn not in order]
    A[leaf, turn] = A_group + turn_weight * (R - mean) / (std + 1e-6)    over the rows of one state; 0 for one row alone

Invariants: states are compared within a group only; the penalty is not discounted into earlier turns; the reward comes
with the last turn, so R is that of the whole episode seen from the turn.
"""

from collections.abc import Sequence
from difflib import SequenceMatcher

import numpy as np

from asyncrl.algo.paths import Credit, Ints, Paths, Scored, standardise
from asyncrl.algo.spark import of_group
from asyncrl.config.algo import AlgoConfig


def gigpo(paths: Paths, algo: AlgoConfig) -> Credit:
    """Credit with the choices of ``algo``: SPARK's, and ``turn_weight``, ``discount``, ``anchor_similarity``."""
    rows, ahead = Scored.of(paths, algo), Scored.of(paths, algo, algo.discount)
    state, value = states(paths.anchors, algo.anchor_similarity)[rows.turn], ahead.value - ahead.penalty
    of_state = np.zeros_like(value)
    for number in np.flatnonzero(np.bincount(state) > 1):
        same = state == number
        of_state[same] = standardise(value[same], value[same], divide=algo.normalise == "mean_std")
    return rows.credit(of_group(paths, rows, algo) + algo.turn_weight * of_state, len(paths.parent))


def states(anchors: Sequence[str], similarity: float) -> Ints:
    """(n,) the state's number for each of n keys: equal keys have one number, and below a ``similarity`` of 1 a key
    takes that of the first state whose first key is at least so similar (``difflib``'s ratio)."""
    numbers: dict[str, int] = {}
    first: list[str] = []
    for anchor in anchors:
        if anchor in numbers:
            continue
        alike = (i for i, key in enumerate(first) if similarity < 1 and _similar(key, anchor, similarity))
        numbers[anchor] = next(alike, len(first))
        if numbers[anchor] == len(first):
            first.append(anchor)
    return np.array([numbers[anchor] for anchor in anchors], dtype=np.int64)


def _similar(a: str, b: str, least: float) -> bool:
    match = SequenceMatcher(None, a, b)
    # The first two are upper bounds, and quick.
    return match.real_quick_ratio() >= least and match.quick_ratio() >= least and match.ratio() >= least
