"""The numbers of a training batch, from group summaries alone. Lags come from the engine's own version spans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from asyncrl.config.run import RunConfig
from asyncrl.rollout.coordinator import GroupSummary


def lag_counts(summaries: Sequence[GroupSummary], version: int) -> Counter[int]:
    """Turns by lag in versions: the version they are trained at minus the oldest that generated one of their tokens."""
    lags: Counter[int] = Counter()
    for summary in summaries:
        for (first, _), turns in summary.spans.items():
            lags[version - first] += turns
    return lags


def batch_metrics(summaries: Sequence[GroupSummary], lags: Counter[int], config: RunConfig) -> dict[str, float]:
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
        "lag/mean": sum(lag * count for lag, count in lags.items()) / turns,
        "lag/max": max(lags),
        "lag/version_spread_mean": sum(s.version_last - s.version_first for s in summaries) / len(summaries),
    }
    metrics |= {f"lag/share_{lag}": lags[lag] / turns for lag in range(config.runtime.max_lag + 1)}
    return metrics | {f"rollout/{name}": float(count) for name, count in counters.items()}
