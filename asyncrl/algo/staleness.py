"""Off-policyness as arithmetic: measured lags by cause, from version spans, and the formula's prediction.

Invariants: the parts of a turn's lag are never negative and add up to it exactly, in versions and in updates; measured
and predicted values never mix.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Lag(NamedTuple):
    """How far the learner went on between a turn's first token and its training, by what the turn was doing."""

    generation: int
    """From its first token to its last."""
    siblings: int
    """From its last token to the completion of its group: waiting for the rest of the forest."""
    queue: int
    """From there to the step that trains it."""

    @property
    def total(self) -> int:
        """Behind the turn's oldest token, which is what the staleness bound holds."""
        return sum(self)


def split_lags(
    spans: Mapping[tuple[int, int], int], done: int, trained: int, counter: Mapping[int, int] | None = None
) -> Counter[Lag]:
    """The turns of one group by their lag.

    Args:
        spans: turns by the first and the last version that generated one of their tokens.
        done: the learner's version when the group completed. Engines are labelled with a new version a moment before
            the learner takes it, so a newer token moves ``done`` up to its own version.
        trained: the learner's counter at use: its version, or with ``counter`` its update.
        counter: the updates made when each version was published; gives lags in updates.

    Raises ValueError: the group was trained before it was complete.
    """
    complete = max([done, *(last for _, last in spans)])
    versions = {complete, *(version for span in spans for version in span)}
    at = {version: version if counter is None else counter[version] for version in versions}
    if at[complete] > trained:
        raise ValueError(f"a group that was complete at {at[complete]} cannot be trained on at {trained}")
    lags: Counter[Lag] = Counter()
    for (first, last), turns in spans.items():
        lags[Lag(at[last] - at[first], at[complete] - at[last], trained - at[complete])] += turns
    return lags


def spread(spans: Iterable[tuple[int, int]]) -> int:
    """Versions between the oldest and the newest token of turns, each given by its first and last version."""
    firsts, lasts = zip(*spans, strict=True)
    return int(max(lasts) - min(firsts))


def expected_lag(rollouts: float, turns: float, micro_batch: float, group: float) -> float:
    """The predicted lag in updates, ``E = N * Tbar / (B * G)`` (our reading of T2PO, appendix B.3).

    Each symbol is measured on the same batch as the lag it stands beside. A turn that several trajectories share is in
    Tbar once for each of them, but in B once, as it is trained once.

    Args:
        rollouts: N, trajectories of a rollout round: the leaves of the batch.
        turns: Tbar, mean turns of a trajectory, from its root to its leaf.
        micro_batch: B, turn samples of one update: those of the batch over the optimizer steps it was trained in.
        group: G, trajectories of one task: the mean leaves of a group.
    """
    return rollouts * turns / (micro_batch * group)


def stale_share(expected: float) -> float:
    """The predicted share of samples generated under stale parameters, ``rho = E / (1 + E)``, in [0, 1)."""
    return expected / (1.0 + expected)
