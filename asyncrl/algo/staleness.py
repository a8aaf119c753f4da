"""Off-policyness as arithmetic over version spans: measured lags, version spreads, and the formula's prediction.

Invariants: a lag is never negative; measured and predicted values never mix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from asyncrl.types import Node, VersionSpan


@dataclass(frozen=True, slots=True)
class TurnLag:
    """How far one turn sample was behind when it was trained, in versions or in updates."""

    first: int
    last: int
    trained: int
    token_lag: float
    """Mean lag of its tokens."""

    @property
    def lag(self) -> int:
        """Lag of its oldest token: what the staleness bound holds."""
        return self.trained - self.first


def turn_lag(spans: Sequence[VersionSpan], trained: int, counter: Mapping[int, int] | None = None) -> TurnLag:
    """The lag of one turn sample.

    Args:
        spans: versions never decrease; at least one span.
        trained: the learner's counter at use: its version, or with ``counter`` its update.
        counter: value of another counter at each version, e.g. the updates made when it was published.

    Raises:
        ValueError: no span, or one from the future.
    """
    if not spans:
        raise ValueError("a turn sample without version spans has no lag")
    at = [span.version if counter is None else counter[span.version] for span in spans]
    if at[-1] > trained:
        raise ValueError(f"a token generated at {at[-1]} cannot be trained on at {trained}")
    lengths = [span.end - span.start for span in spans]
    behind = sum((trained - value) * length for value, length in zip(at, lengths, strict=True))
    return TurnLag(at[0], at[-1], trained, behind / max(1, sum(lengths)))


@dataclass(frozen=True, slots=True)
class LagSummary:
    mean: float
    """Over turn samples, of the oldest token's lag; 0 where there is none."""
    max: int
    token_mean: float
    """Over turn samples, of their tokens' mean lag."""
    histogram: dict[int, int]
    """Oldest token's lag -> turn samples, in increasing order."""


def summarise(lags: Sequence[TurnLag]) -> LagSummary:
    histogram = Counter(lag.lag for lag in lags)
    n = max(1, len(lags))
    return LagSummary(
        mean=sum(lag.lag for lag in lags) / n,
        max=max(histogram, default=0),
        token_mean=sum(lag.token_lag for lag in lags) / n,
        histogram=dict(sorted(histogram.items())),
    )


def version_spread(nodes: Iterable[Node]) -> int:
    """Newest minus oldest version among the tokens of ``nodes``, e.g. of a group; 0 where there is none."""
    versions = [span.version for node in nodes for span in node.turn.generation.spans]
    return max(versions) - min(versions) if versions else 0


def sibling_spreads(nodes: Iterable[Node]) -> list[int]:
    """The version spread of each sibling set: nodes of one parent, where a branch gave it more than one."""
    siblings: dict[int, list[Node]] = {}
    for node in nodes:
        if node.parent is not None:
            siblings.setdefault(node.parent, []).append(node)
    return [version_spread(those) for those in siblings.values() if len(those) > 1]


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
