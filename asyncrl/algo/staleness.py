"""Off-policyness as arithmetic: measured lags from version spans, and the formula's prediction.

Invariants: a lag is never negative; measured and predicted values never mix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping


def lags(spans: Mapping[tuple[int, int], int], trained: int, counter: Mapping[int, int] | None = None) -> Counter[int]:
    """Turns by the lag of their oldest token, which is what the staleness bound holds.

    Args:
        spans: turns by the first and the last version that generated one of their tokens.
        trained: the learner's counter at use: its version, or with ``counter`` its update.
        counter: the updates made when each version was published; gives lags in updates.

    Raises:
        ValueError: a token from the future.
    """
    found: Counter[int] = Counter()
    for (first, last), turns in spans.items():
        oldest, newest = (first, last) if counter is None else (counter[first], counter[last])
        if newest > trained:
            raise ValueError(f"a token generated at {newest} cannot be trained on at {trained}")
        found[trained - oldest] += turns
    return found


def expected_lag(rollouts: float, turns: float, micro_batch: float, group: float) -> float:
    """The predicted lag in updates, ``E = N * Tbar / (B * G)`` (our reading of T2PO, appendix B.3).

    Args:
        rollouts: N, trajectories generated per rollout round.
        turns: Tbar, mean turns of a trajectory.
        micro_batch: B, turn samples of one update.
        group: G, trajectories of one task.

    Raises:
        ValueError: B or G is not positive.
    """
    if micro_batch <= 0 or group <= 0:
        raise ValueError(f"micro_batch and group must be positive, got {micro_batch} and {group}")
    return rollouts * turns / (micro_batch * group)


def stale_share(expected: float) -> float:
    """The predicted share of samples generated under stale parameters, ``rho = E / (1 + E)``, in [0, 1)."""
    return expected / (1.0 + expected)
