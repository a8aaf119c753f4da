"""The numbers of a training batch, from group summaries alone.

Invariants: lags come from the engine's own version spans; measured lags and the formula's prediction stand side by side
under names of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from asyncrl.algo.staleness import expected_lag, stale_share
from asyncrl.rollout.coordinator import GroupSummary


def spans_of(summaries: Sequence[GroupSummary]) -> Counter[tuple[int, int]]:
    """Turn samples of a batch by (first, last) version of their tokens."""
    spans: Counter[tuple[int, int]] = Counter()
    for summary in summaries:
        spans.update(summary.spans)
    return spans


def lag_metrics(
    summaries: Sequence[GroupSummary], in_versions: Counter[int], in_updates: Counter[int], updates: float
) -> dict[str, float]:
    """Measured lag in versions and updates, beside the predicted one (in updates).

    Args:
        updates: optimizer steps the batch was trained in.
    """
    turns, leaves = in_versions.total(), sum(summary.leaves for summary in summaries)
    path_turns = sum(summary.leaf_turns_mean * summary.leaves for summary in summaries) / leaves
    expected = expected_lag(leaves, path_turns, turns / max(1.0, updates), leaves / len(summaries))
    spreads = [max(last for _, last in s.spans) - min(first for first, _ in s.spans) for s in summaries]
    return {
        "lag/mean": sum(lag * count for lag, count in in_versions.items()) / turns,
        "lag/max": max(in_versions),
        "lag/updates_mean": sum(lag * count for lag, count in in_updates.items()) / turns,
        "lag/updates_expected": expected,
        "lag/stale_share": 1 - in_updates[0] / turns,
        "lag/stale_share_expected": stale_share(expected),
        "lag/version_spread_mean": sum(spreads) / len(spreads),
    }


def batch_metrics(summaries: Sequence[GroupSummary]) -> dict[str, float]:
    leaves = sum(summary.leaves for summary in summaries)
    turns = sum(summary.turns for summary in summaries)
    counters: Counter[str] = Counter()
    for summary in summaries:
        counters.update(summary.counters)
    metrics = {
        "rollout/success": sum(summary.successes for summary in summaries) / leaves,
        "rollout/groups": len(summaries),
        "rollout/leaves": leaves,
        "rollout/leaves_max": max(summary.leaves for summary in summaries),
        "rollout/turn_samples": turns,
        "rollout/leaf_turns_mean": sum(summary.leaf_turns_mean * summary.leaves for summary in summaries) / leaves,
        "rollout/valid_turns": sum(summary.valid_turns for summary in summaries) / turns,
        "rollout/explore_rate": sum(summary.exploring_turns for summary in summaries) / turns,
        "rollout/branched_turn_share": sum(summary.branched_turns for summary in summaries) / turns,
        "rollout/tokens": sum(summary.tokens for summary in summaries),
        "rollout/prompt_tokens": sum(summary.prompt_tokens for summary in summaries),
        "rollout/group_s_mean": sum(summary.seconds for summary in summaries) / len(summaries),
    }
    return metrics | {f"rollout/{name}": float(count) for name, count in counters.items()}
