"""Batch and run figures against slow counts over single turns; tallies and meters through JSON."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algo.samples import turn_samples
from asyncrl.config.algo import AlgoConfig
from asyncrl.evaluate.episodes import report
from asyncrl.learner.batch import weight
from asyncrl.rollout.coordinator import EpisodeLost
from asyncrl.rollout.summary import GroupSummary, Tally, summarise
from asyncrl.runtime.ledger import GIVEN_UP, TRAINED, Entry, Ledger
from asyncrl.runtime.measure import batch_metrics, lag_figures
from asyncrl.runtime.state import RunState, Totals, Trained
from asyncrl.types import Group, token_digest
from tests.unit.growing import grow, make_forest, make_turn

SEEDS = st.integers(0, 10_000)
LEARNED = {"updates": 2.0, "digests_checked": 7.0, "digest_mismatches": 1.0}


def some_group(rng: Random) -> Group:
    """A grown forest; a turn has tokens of one or two versions between 0 and 3."""
    return grow(make_forest(roots=2, branch=rng.randint(2, 3), leaves=6, seed=rng.randrange(99)), rng).group(
        rng.random()
    )


class Batch(NamedTuple):
    groups: list[Group]
    done: list[int]
    version: int
    updates_at: list[int]
    updates: int
    """A batch, as configured."""
    empty: set[int]
    """Groups in which nothing is trained."""


def some_batch(seed: int) -> Batch:
    rng = Random(seed)
    groups = [some_group(rng) for _ in range(rng.randint(1, 5))]
    done = [rng.randint(newest(group) - 1, 5) for group in groups]
    version = max([*done, *map(newest, groups)]) + rng.randint(0, 2)
    updates_at = [0]
    while len(updates_at) <= version:
        updates_at.append(updates_at[-1] + rng.randint(1, 4))
    empty = set(rng.sample(range(len(groups)), rng.randint(0, len(groups))))
    return Batch(groups, done, version, updates_at, rng.randint(1, 3), empty)


def newest(group: Group) -> int:
    return max(span.version for node in group.nodes for span in node.turn.generation.spans)


def trained(batch: Batch) -> list[Trained]:
    return [
        (replace(summarise(group, 100), trained_tokens=int(i not in batch.empty)), done)
        for i, (group, done) in enumerate(zip(batch.groups, batch.done, strict=True))
    ]


def figures(batch: Batch) -> tuple[dict[str, float], dict[str, list[float]]]:
    updates_at = dict(enumerate(batch.updates_at))
    return lag_figures(trained(batch), batch.version, batch.updates_at[batch.version], updates_at, batch.updates)


def steps_before(groups: int, updates: int, empty: set[int]) -> list[int]:
    """Optimizer steps of its own batch that precede each group's, by dealing out the groups one by one."""
    updates = min(updates, groups)
    part = [max(step for step in range(updates) if groups * step // updates <= i) for i in range(groups)]
    return [len({part[other] for other in range(i) if other not in empty} - {part[i]}) for i in range(groups)]


@settings(max_examples=60)
@given(SEEDS)
def test_lag_figures_are_those_of_the_single_turns(seed: int) -> None:
    batch = some_batch(seed)
    rows: dict[str, list[float]] = {}
    path_turns = []
    before = steps_before(len(batch.groups), batch.updates, batch.empty)
    for group, done, step in zip(batch.groups, batch.done, before, strict=True):
        complete = max(done, newest(group))
        at = batch.updates_at
        for node in group.nodes:
            versions = [span.version for span in node.turn.generation.spans]
            first, last = min(versions), max(versions)
            parts = {
                "lag/versions": batch.version - first,
                "lag/generation": last - first,
                "lag/siblings": complete - last,
                "lag/queue": batch.version - complete,
                "lag/updates": at[batch.version] + step - at[first],
                "lag/updates_generation": at[last] - at[first],
                "lag/updates_siblings": at[complete] - at[last],
                "lag/updates_queue": at[batch.version] + step - at[complete],
            }
            for name, value in parts.items():
                rows.setdefault(name, []).append(value)
        ages = [span.version for node in group.nodes for span in node.turn.generation.spans]
        rows.setdefault("lag/group_spread", []).append(max(ages) - min(ages))
        rows.setdefault("lag/sibling_spread", [])
        for node in group.nodes:
            ages = [s.version for child in group.nodes if child.parent == node.id for s in child.turn.generation.spans]
            if sum(child.parent == node.id for child in group.nodes) > 1:
                rows["lag/sibling_spread"].append(max(ages) - min(ages))
        path_turns += [len(group.path(leaf)) for leaf in group.leaves]

    metrics, histograms = figures(batch)
    assert {name: sorted(values) for name, values in histograms.items()} == {n: sorted(v) for n, v in rows.items()}
    for name, values in rows.items():
        stem = "lag/" if name == "lag/versions" else f"{name}_"
        assert (f"{stem}mean" in metrics) == bool(values)
        if values:
            assert metrics[f"{stem}mean"] == pytest.approx(statistics.mean(values))
            assert metrics[f"{stem}max"] == max(values)
    assert metrics["lag/mean"] == pytest.approx(
        metrics["lag/generation_mean"] + metrics["lag/siblings_mean"] + metrics["lag/queue_mean"]
    )
    turns, leaves = len(rows["lag/versions"]), len(path_turns)
    made = max(1, len({step for i, step in enumerate(before) if i not in batch.empty}))
    expected = leaves * statistics.mean(path_turns) / (turns / made * leaves / len(batch.groups))
    assert metrics["lag/updates_expected"] == pytest.approx(expected)
    assert metrics["lag/stale_share_expected"] == pytest.approx(expected / (1 + expected))
    assert metrics["lag/stale_share"] == pytest.approx(sum(lag > 0 for lag in rows["lag/updates"]) / turns)


def test_a_batch_without_an_update_still_has_figures() -> None:
    metrics, _ = figures(some_batch(3)._replace(updates=3, empty=set(range(5))))
    assert metrics == figures(some_batch(3)._replace(updates=1, empty=set()))[0]


def test_children_of_one_branch_are_compared_by_their_first_turns() -> None:
    """The parent goes on at once, its child waits two versions for a slot; later turns of either do not count."""
    forest = make_forest(roots=1, branch=2, leaves=2)
    forest.extend(0, make_turn(explores=True, version=1, tokens=1))
    forest.serve([0])
    forest.extend(0, make_turn("a", version=1, tokens=1))
    forest.extend(1, make_turn("a", version=3, tokens=1))
    for leaf in (0, 1):
        forest.extend(leaf, make_turn("b", version=7, tokens=1, terminated=True))
        forest.finish(leaf, success=True)
    summary = summarise(forest.group(), 100)
    assert summary.sibling_spreads == {2: 1}
    metrics, _ = lag_figures([(summary, 8)], 8, 8, {version: version for version in range(9)}, 1)
    assert (metrics["lag/sibling_spread_mean"], metrics["lag/group_spread_mean"]) == (2, 6)


def test_the_digest_is_that_of_all_response_ids_in_order() -> None:
    group = some_group(Random(0))
    ids: list[int] = []
    for node in group.nodes:
        ids += node.turn.generation.token_ids
    assert summarise(group, 100).digest == token_digest(ids)


@given(st.lists(SEEDS, max_size=6), st.randoms(use_true_random=False))
def test_a_tally_counts_single_turns_and_leaves_in_any_order(seeds: list[int], rng: Random) -> None:
    groups = [some_group(Random(seed)) for seed in seeds]
    turns = [node.turn for group in groups for node in group.nodes]
    summaries = [summarise(group, 100) for group in groups]
    tally = Tally.of(summaries)
    assert tally.groups == len(groups)
    assert tally.leaves == sum(len(group.leaves) for group in groups)
    assert tally.leaves_max == max((len(group.leaves) for group in groups), default=0)
    assert tally.successes == sum(leaf.success for group in groups for leaf in group.leaves)
    assert tally.turns == len(turns)
    assert tally.valid_turns == sum(turn.parsed.valid for turn in turns)
    assert tally.exploring_turns == sum(turn.parsed.explores for turn in turns)
    assert tally.leaf_turns == sum(len(group.path(leaf)) for group in groups for leaf in group.leaves)
    assert tally.tokens == sum(len(turn.generation.token_ids) for turn in turns)
    assert tally.prompt_tokens == 2 * len(turns)
    assert tally.seconds == pytest.approx(sum(group.seconds for group in groups))
    assert tally.branched_turns == sum(
        sum(other.parent == node.id for other in group.nodes) > 1 for group in groups for node in group.nodes
    )
    for name in ("triggers", "children"):
        assert tally.counters[name] == sum(group.counters[name] for group in groups)
    rng.shuffle(summaries)
    again = Tally.of(summaries)
    assert replace(again, seconds=0) == replace(tally, seconds=0)
    assert again.seconds == pytest.approx(tally.seconds)


def test_shares_of_nothing_are_zero() -> None:
    tally = Tally()
    assert (tally.success, tally.valid, tally.branched, tally.leaf_turns_mean) == (0, 0, 0, 0)


def test_batch_metrics_are_shares_of_the_whole_batch() -> None:
    groups = [some_group(Random(seed)) for seed in range(4)]
    turns = [node.turn for group in groups for node in group.nodes]
    leaves = [leaf for group in groups for leaf in group.leaves]
    metrics = batch_metrics(summarise(group, 100) for group in groups)
    assert metrics["rollout/success"] == pytest.approx(statistics.mean(leaf.success for leaf in leaves))
    assert metrics["rollout/valid_turns"] == pytest.approx(statistics.mean(turn.parsed.valid for turn in turns))
    assert metrics["rollout/explore_rate"] == pytest.approx(statistics.mean(turn.parsed.explores for turn in turns))
    assert metrics["rollout/group_s_mean"] == pytest.approx(statistics.mean(group.seconds for group in groups))
    paths = [len(group.path(leaf)) for group in groups for leaf in group.leaves]
    assert metrics["rollout/leaf_turns_mean"] == pytest.approx(statistics.mean(paths))
    assert metrics["rollout/children"] == sum(group.counters["children"] for group in groups)


@settings(max_examples=30)
@given(st.lists(SEEDS, max_size=4))
def test_a_runs_totals_add_up_and_survive_json(seeds: list[int]) -> None:
    totals = Totals(lost=3, logprob_gap_max=0.25)
    lags: list[int] = []
    for seed in seeds:
        batch = some_batch(seed)
        totals.train(trained(batch), batch.version, LEARNED)
        saved = json.dumps(RunState(totals=totals).to_json())
        totals = RunState.from_json(json.loads(saved), {}).totals  # resumed after every batch
        for group in batch.groups:
            lags += [batch.version - min(span.version for span in node.turn.generation.spans) for node in group.nodes]
    found = totals.summary()
    assert sorted(totals.lags.elements()) == sorted(lags)
    assert (found["turn_samples"], found["lag_max"]) == (len(lags), max(lags, default=0))
    assert found["lag_mean"] == pytest.approx(statistics.mean(lags) if lags else 0)
    assert (found["digests_checked"], found["digest_mismatches"]) == (7 * len(seeds), len(seeds))
    assert (found["groups_lost"], found["publish_logprob_gap_max"]) == (3, 0.25)
    assert found["groups"] == sum(len(some_batch(seed).groups) for seed in seeds)


def episode(turns: int, success: bool) -> GroupSummary:
    forest = make_forest(roots=1, branch=2, leaves=1)
    for i in range(turns):
        forest.extend(0, make_turn(valid=i > 0, terminated=i == turns - 1, tokens=4))
    forest.finish(0, success)
    return summarise(forest.group(), 100)


def test_an_evaluation_reports_shares_of_finished_episodes() -> None:
    worker = EpisodeLost("env_worker", "no environment slot became free within 60 s")
    died = [EpisodeLost("generator", f"generator-{i} died") for i in range(2)]
    found = report([episode(1, True), worker, episode(3, False), *died[:1], episode(2, True)])
    assert (found.episodes, found.lost) == (3, 2)
    assert found.success == pytest.approx(2 / 3)
    assert 0 < found.success_low < found.success < found.success_high < 1
    assert (found.turns_mean, found.tokens_mean) == (2, 8)
    assert found.valid_turns == pytest.approx(3 / 6)
    causes = "all 3 episodes were lost, 2 by generator, at last: generator-1 died; 1 by env_worker, at last: no env"
    with pytest.raises(RuntimeError, match=causes):
        report([died[0], worker, died[1]])


@pytest.mark.parametrize(
    ("successes", "trials", "interval"),
    [
        (0, 1, (0.0, 0.7934506856227626)),
        (0, 40, (0.0, 0.08762160119728662)),
        (1, 3, (0.06149194472039626, 0.7923403991979523)),
        (17, 40, (0.28509392559950375, 0.5780493145800892)),
        (200, 200, (0.9811546736227335, 1.0)),
    ],
)
def test_the_interval_is_wilsons(successes: int, trials: int, interval: tuple[float, float]) -> None:
    found = report([episode(1, success=i < successes) for i in range(trials)])
    assert (found.success_low, found.success_high) == pytest.approx(interval, abs=1e-12)


Ended = tuple[float, bool, bool]
ENDED = st.tuples(st.floats(0, 100), st.booleans(), st.booleans())


def bias_of(ended: Sequence[Ended]) -> dict[str, float]:
    """Of tasks that took so many seconds, were known to be solved, and were trained."""
    ledger = Ledger()
    for at, (seconds, solved, trained) in enumerate(ended):
        ledger.add(Entry(at, "pantry", str(at), 0, at, TRAINED if trained else GIVEN_UP, 0, seconds, solved=solved))
    return ledger.bias()


@given(st.lists(ENDED, max_size=30))
def test_without_drops_training_sees_what_ended(ended: list[Ended]) -> None:
    shares = bias_of([(seconds, solved, True) for seconds, solved, _ in ended])
    assert shares.get("bias/long_ended") == shares.get("bias/long_trained")
    assert shares.get("bias/hard_ended") == shares.get("bias/hard_trained")
    assert len(shares) == (4 if ended else 0)


@given(st.lists(ENDED, max_size=30))
def test_shares_of_long_and_hard_groups(ended: list[Ended]) -> None:
    shares = bias_of(ended)
    order = sorted(seconds for seconds, _, _ in ended)
    for name in ("ended", "trained"):
        some = [one for one in ended if name == "ended" or one[2]]
        longer = [2 * one[0] > order[(len(order) - 1) // 2] + order[len(order) // 2] for one in some]
        unsolved = [not one[1] for one in some]
        for kind, flags in (("long", longer), ("hard", unsolved)):
            assert shares.get(f"bias/{kind}_{name}") == (pytest.approx(sum(flags) / len(flags)) if flags else None)


def test_dropping_long_groups_shows() -> None:
    rng = Random(0)
    seconds = [rng.lognormvariate(0, 1.2) for _ in range(400)]
    shares = bias_of([(s, s <= 2 and i % 2 == 0, s <= 2) for i, s in enumerate(seconds)])
    assert shares["bias/long_ended"] == 0.5
    assert shares["bias/long_trained"] < 0.35
    assert shares["bias/hard_trained"] < 0.55 < shares["bias/hard_ended"]  # what was dropped counts as hard


@settings(max_examples=20)
@given(SEEDS)
def test_trained_tokens_are_what_the_learner_divides_by(seed: int) -> None:
    group = some_group(Random(seed))
    samples = turn_samples(group, AlgoConfig())
    assert summarise(group, 100, samples).trained_tokens == weight(samples) > 0
    assert summarise(group, 100).trained_tokens == 0
