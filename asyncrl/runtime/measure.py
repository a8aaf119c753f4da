"""The numbers of training batches and of a run, from group summaries alone.

Invariants: lags come from the engine's own version spans, and their parts add up turn by turn; measured lags and the
formula's prediction stand side by side under names of their own.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from statistics import fmean
from typing import Any

from asyncrl.algo.staleness import Lag, expected_lag, split_lags, spread, stale_share
from asyncrl.evaluate.episodes import EvalReport
from asyncrl.learner.packing import split_groups
from asyncrl.rollout.summary import GroupSummary, Tally
from asyncrl.runtime.ledger import TRAINED
from asyncrl.runtime.state import RunState, Trained


def lag_figures(
    groups: Sequence[Trained], version: int, update: int, updates_at: Mapping[int, int], updates_per_batch: int
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Lags of a batch's turns by cause, in versions and updates; spreads in versions of groups and of sibling sets.

    Args:
        groups: in the order in which the learner took them.
        version, update: the learner's counters before the batch's first optimizer step.
        updates_at: updates made when each version was published.
        updates_per_batch: as configured; a group lags by the steps before its own that had something to train, too.

    Returns means and maxima, with the formula's prediction beside the measured mean; and the values as histograms.
    """
    versions: list[Lag] = []
    steps: list[Lag] = []
    made = 0
    for members in split_groups(len(groups), updates_per_batch):
        part = groups[members.start : members.stop]
        for summary, done in part:
            versions += split_lags(summary.spans, done, version).elements()
            steps += split_lags(summary.spans, done, update + made, updates_at).elements()
        made += any(summary.trained_tokens for summary, _ in part)
    tally = Tally.of(summary for summary, _ in groups)
    sets = [Counter(summary.sibling_spreads).elements() for summary, _ in groups]
    histograms: dict[str, list[float]] = {
        "lag/versions": [lag.total for lag in versions],
        "lag/updates": [lag.total for lag in steps],
        "lag/group_spread": [spread(summary.spans) for summary, _ in groups],
        "lag/sibling_spread": [*chain(*sets)],
    }
    for at, cause in enumerate(Lag._fields):
        histograms[f"lag/{cause}"] = [lag[at] for lag in versions]
        histograms[f"lag/updates_{cause}"] = [lag[at] for lag in steps]
    expected = expected_lag(
        tally.leaves, tally.leaf_turns_mean, tally.turns / max(1, made), tally.leaves / tally.groups
    )
    metrics = {
        "lag/updates_expected": expected,
        "lag/stale_share": sum(lag.total > 0 for lag in steps) / tally.turns,
        "lag/stale_share_expected": stale_share(expected),
    }
    for name, values in histograms.items():
        stem = "lag/" if name == "lag/versions" else f"{name}_"
        if values:  # a batch without a branch has no sibling set
            metrics |= {f"{stem}mean": fmean(values), f"{stem}max": max(values)}
    return metrics, histograms


def batch_metrics(summaries: Iterable[GroupSummary]) -> dict[str, float]:
    tally = Tally.of(summaries)
    metrics = {
        "rollout/success": tally.success,
        "rollout/groups": tally.groups,
        "rollout/leaves": tally.leaves,
        "rollout/leaves_max": tally.leaves_max,
        "rollout/turn_samples": tally.turns,
        "rollout/leaf_turns_mean": tally.leaf_turns_mean,
        "rollout/valid_turns": tally.valid,
        "rollout/explore_rate": tally.exploring_turns / tally.turns,
        "rollout/branched_turn_share": tally.branched,
        "rollout/tokens": tally.tokens + tally.counters["tokens_discarded"],
        "rollout/tokens_kept": tally.tokens,
        "rollout/prompt_tokens": tally.prompt_tokens,
        "rollout/group_s_mean": tally.seconds / tally.groups,
    }
    return metrics | {f"rollout/{name}": float(count) for name, count in tally.counters.items()}


def thinking_figures(summaries: Sequence[GroupSummary]) -> tuple[dict[str, float], dict[str, list[float]]]:
    """T2PO's curves, of batches whose turns the engine measured: metrics and histograms; nothing of others."""
    histograms = {
        f"thinking/{name}": [*chain(*(summary.thinking.get(name, ()) for summary in summaries))]
        for name in ("phi", "gamma", "gamma_mixed", "tokens")
    }
    histograms = {name: values for name, values in histograms.items() if values}
    if not histograms:
        return {}, {}
    tally = Tally.of(summaries)
    discarded = tally.counters["tokens_discarded"]
    metrics = {
        "thinking/cut_stable_share": tally.counters["cut_stable"] / tally.turns,
        "thinking/cut_cap_share": tally.counters["cut_cap"] / tally.turns,
        "thinking/resamples_per_turn": tally.counters["resamples"] / tally.turns,
        "thinking/discarded_share": discarded / (tally.tokens + discarded),
    }
    return metrics | {f"{name}_mean": fmean(values) for name, values in histograms.items()}, histograms


def profile(state: RunState, spent: Mapping[str, float], slots: int) -> dict[str, float]:
    """Where time went, as shares: of the loop for learner and driver, of the engines' and slots' time for the others;
    ``slot_waiters_mean`` is how many leaves waited for a slot.

    ``spent``: what fleet and pool counted while this process ran the loop, nothing where they did not say.
    """
    seconds, spent = state.seconds, Counter(spent)
    loop, slot_seconds = _loop_seconds(state), slots * spent["env_seconds"]
    parts = {
        "trainer_wait_share": (seconds["wait"], loop),
        "train_share": (seconds["update"], loop),
        "publish_share": (seconds["publish"], loop),
        "admission_blocked_share": (seconds["admission_blocked"], loop),
        "generator_idle_share": (spent["idle_s"], spent["seconds"]),
        # What a worker that was replaced had counted is gone, so busy may come out below nothing.
        "env_idle_share": (slot_seconds - max(0.0, spent["env_busy_s"]), slot_seconds),
        "slots_leased_share": (spent["leased_s"], slot_seconds),
        "slot_waiters_mean": (spent["acquire_wait_s"], spent["env_seconds"]),
        "turn_samples_per_s": (state.totals.turns, loop),
    }
    return {name: part / whole if whole else 0.0 for name, (part, whole) in parts.items()}


def _loop_seconds(state: RunState) -> float:
    return state.seconds["wait"] + state.seconds["update"] + state.seconds["publish"]


def run_summary(before: EvalReport, after: EvalReport, state: RunState, profile: dict[str, float]) -> dict[str, Any]:
    """What ``summary.json`` says of reinforcement learning."""
    lost = [entry for entry in state.ledger if entry.outcome != TRAINED]
    return {
        "success_coldstart": before.success,
        "success_coldstart_interval": [before.success_low, before.success_high],
        "success_final": after.success,
        "success_final_interval": [after.success_low, after.success_high],
        "valid_turns_coldstart": before.valid_turns,
        "valid_turns_final": after.valid_turns,
        "eval_episodes": after.episodes,
        "updates": state.update,
        "versions": state.version,
        "tasks_given_up": {entry.position: f"{entry.env}/{entry.task}: {entry.cause}" for entry in lost},
        **state.totals.summary(),
        "profile": profile,
        "seconds": {**state.seconds, "train": _loop_seconds(state)},
    }
