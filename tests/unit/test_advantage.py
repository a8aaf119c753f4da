import difflib
import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algo.gigpo import gigpo, states
from asyncrl.algo.paths import Paths
from asyncrl.algo.spark import spark
from asyncrl.config.algo import AlgoConfig

STATISTICS, NORMALISE, PREFIX = ("steps", "trajectories"), ("mean_std", "mean"), ("duplicate", "mean")
MODES = list(product(STATISTICS, NORMALISE, PREFIX))


def paths(parent, end, returns, valid=None, trained=None, anchors=None):
    return Paths(
        np.array(parent),
        np.array(end),
        np.array(returns, dtype=float),
        np.ones(len(parent), dtype=bool) if valid is None else np.array(valid, dtype=bool),
        np.ones(len(end), dtype=bool) if trained is None else np.array(trained, dtype=bool),
        [str(i) for i in range(len(parent))] if anchors is None else anchors,
    )


def algo(statistics="steps", normalise="mean_std", prefix="duplicate", penalty=0.1):
    return AlgoConfig(statistics=statistics, normalise=normalise, prefix=prefix, invalid_penalty=penalty)


def oracle(parent, end, returns, valid, trained, statistics, normalise, prefix, penalty):
    """The definition, row by row in plain Python: returns [(positive, negative, copies)] for each turn."""
    rows = []
    for leaf, turn in enumerate(end):
        while turn != -1:
            rows.append((turn, returns[leaf], trained[leaf]))
            turn = parent[turn]
    if prefix == "mean":
        merged = []
        for turn in range(len(parent)):
            mine = [r for t, r, _ in rows if t == turn]
            merged.append((turn, math.fsum(mine) / len(mine), any(kept for t, _, kept in rows if t == turn)))
        rows = merged
    scores = [r - (0.0 if valid[t] else penalty) for t, r, _ in rows]
    population = scores if statistics == "steps" else list(returns)
    if len(population) == 1:
        mean, std = 0.0, 1.0
    else:
        mean = math.fsum(population) / len(population)
        std = math.sqrt(math.fsum((x - mean) ** 2 for x in population) / (len(population) - 1))
    if std < 1e-9:
        std = 1.0
    result = [[0.0, 0.0, 0] for _ in parent]
    for (turn, _, kept), score in zip(rows, scores, strict=True):
        if not kept:
            continue
        advantage = score - mean if normalise == "mean" else (score - mean) / (std + 1e-6)
        result[turn][0 if advantage > 0 else 1] += advantage
        result[turn][2] += 1
    return result


@st.composite
def random_trees(draw):
    """Forests with nested branches; a leaf may also end at a turn that others pass through."""
    n = draw(st.integers(1, 24))
    parent = [draw(st.integers(max(-1, i - 4), i - 1)) for i in range(n)]
    tips = [i for i in range(n) if i not in parent]
    inner = [i for i in range(n) if i in parent]
    end = tips + (draw(st.lists(st.sampled_from(inner), unique=True, max_size=2)) if inner else [])
    values = draw(st.sampled_from([[0.0], [10.0], [0.0, 10.0], [0.0, 0.3, 1.0, 10.0]]))
    returns = [draw(st.sampled_from(values)) for _ in end]
    valid = [draw(st.booleans()) for _ in range(n)] if draw(st.booleans()) else [True] * n
    trained = [draw(st.booleans()) for _ in end] if draw(st.booleans()) else [True] * len(end)
    return parent, end, returns, valid, trained


@given(random_trees(), st.sampled_from(MODES), st.sampled_from([0.0, 0.1, 1.0]))
def test_agrees_with_the_definition_row_by_row(tree, mode, penalty):
    expected = oracle(*tree, *mode, penalty)
    got = spark(paths(*tree), algo(*mode, penalty))
    for i, (positive, negative, copies) in enumerate(expected):
        assert got.positive[i] == pytest.approx(positive, abs=1e-6)
        assert got.negative[i] == pytest.approx(negative, abs=1e-6)
        assert got.copies[i] == copies


# One tree of three turns, its first shared by a success (turn 1) and a failure (turn 2), and a one-turn tree that
# fails with an invalid output (turn 3).
SHARED = ([-1, 0, 0, -1], [1, 2, 3], [10.0, 0.0, 0.0], [True, True, True, False])


def test_shared_prefix_by_hand_duplicated():
    # Rows 10, 10, 0, 0, -0.1: mean 3.98, variance 120.808 / 4, std 5.495635.
    got = spark(paths(*SHARED), algo())
    np.testing.assert_allclose(got.positive, [1.095414, 1.095414, 0, 0], atol=1e-6)
    np.testing.assert_allclose(got.negative, [-0.724211, 0, -0.724211, -0.742407], atol=1e-6)
    assert got.copies.tolist() == [2, 1, 1, 1]


def test_shared_prefix_by_hand_with_the_mean():
    # Rows 5, 10, 0, -0.1: mean 3.725, variance 69.5075 / 3, std 4.813436.
    got = spark(paths(*SHARED), algo(prefix="mean"))
    np.testing.assert_allclose(got.positive, [0.264883, 1.303642, 0, 0], atol=1e-6)
    np.testing.assert_allclose(got.negative, [0, 0, -0.773875, -0.794651], atol=1e-6)
    assert got.copies.tolist() == [1, 1, 1, 1]


def test_trajectory_statistics_by_hand():
    # Returns 10, 0, 0: mean 10/3, std 5.773503; the penalty shows in the row, not in the statistics.
    got = spark(paths(*SHARED), algo("trajectories"))
    np.testing.assert_allclose(got.positive, [1.154700, 1.154700, 0, 0], atol=1e-6)
    np.testing.assert_allclose(got.negative, [-0.577350, 0, -0.577350, -0.594671], atol=1e-6)


@given(random_trees(), st.sampled_from(STATISTICS), st.sampled_from(NORMALISE))
def test_deduplicated_clipped_loss_equals_that_of_the_copies(tree, statistics, normalise):
    parent, end, returns, valid, trained = tree
    ratios = np.exp(np.random.default_rng(0).normal(0, 1, len(parent)))
    low, high, dual = 0.8, 1.2, 3.0

    def clipped(a, r):
        inner = -min(a * r, a * min(max(r, low), high))
        return min(inner, -a * dual) if a < 0 else inner

    # Copies: every leaf a chain of its own.
    chain_parent, chain_end, chain_of = [], [], []
    for tip in end:
        path = []
        while tip != -1:
            path.append(tip)
            tip = parent[tip]
        for depth, turn in enumerate(reversed(path)):
            chain_parent.append(-1 if depth == 0 else len(chain_parent) - 1)
            chain_of.append(turn)
        chain_end.append(len(chain_parent) - 1)
    chains = paths(chain_parent, chain_end, returns, [valid[t] for t in chain_of], trained)
    copies = spark(chains, algo(statistics, normalise))
    of_copies = sum(
        clipped(positive + negative, ratios[turn])
        for turn, positive, negative in zip(chain_of, copies.positive, copies.negative, strict=True)
    )
    got = spark(paths(*tree), algo(statistics, normalise))
    deduplicated = sum(
        -positive * min(r, high) + abs(negative) * min(max(r, low), dual)
        for r, positive, negative in zip(ratios, got.positive, got.negative, strict=True)
    )
    assert deduplicated == pytest.approx(of_copies, abs=1e-6)
    assert got.copies.sum() == copies.copies.sum()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("value", [0.0, 10.0, 0.1])
def test_equal_scores_give_no_advantage_at_all(mode, value):
    tree = paths([-1, 0, 0, -1, 3, 4], [1, 2, 5], [value] * 3)
    got = spark(tree, algo(*mode))
    assert not got.positive.any()
    assert not got.negative.any()


def test_float_noise_is_not_divided_by_float_noise():
    noisy = [0.1 + 0.2, 0.3, 0.3 + 1e-16]
    got = spark(paths([-1, -1, -1], [0, 1, 2], noisy), algo())
    assert not got.positive.any()
    assert not got.negative.any()


def test_a_penalty_amid_equal_returns_is_not_blown_up_by_trajectory_statistics():
    got = spark(paths([-1, -1], [0, 1], [0.0, 0.0], [True, False]), algo("trajectories"))
    assert got.negative[1] == pytest.approx(-0.1, abs=1e-6)


@pytest.mark.parametrize("statistics", STATISTICS)
def test_a_single_row_keeps_its_score(statistics):
    got = spark(paths([-1], [0], [10.0]), algo(statistics))
    assert got.positive[0] == pytest.approx(10.0 / (1 + 1e-6))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([-1, 1], [1], [0.0]), "index of an earlier turn"),
        (([-1, -2], [0, 1], [0.0, 0.0]), "index of an earlier turn"),
        (([-1, 0], [2], [0.0]), "must end at a turn 0..1"),
        (([-1, 0, 0], [1], [0.0]), r"turns \[2\] lie under no leaf"),
        (([-1], [0], [0.0, 1.0]), r"returns and trained \(1,\)"),
        (([-1], [0], [0.0], [True, True]), r"in_order and anchors must be \(1,\)"),
    ],
)
def test_impossible_paths_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        paths(*arguments)


# -- GiGPO -------------------------------------------------------------------------------------------------------------


def told(parent, end, returns, valid, trained, anchors, algo):
    """GiGPO row by row in plain Python: [(positive, negative, copies)] for each turn."""
    rows = []  # turn, reward to go, return, whether trained
    for leaf, turn in enumerate(end):
        to_go = returns[leaf]
        while turn != -1:
            rows.append((turn, to_go, returns[leaf], trained[leaf]))
            turn, to_go = parent[turn], algo.discount * to_go

    def standardised(value, population):
        if len(population) == 1:
            return value if algo.normalise == "mean" else value / (1 + 1e-6)
        mean = math.fsum(population) / len(population)
        std = math.sqrt(math.fsum((x - mean) ** 2 for x in population) / (len(population) - 1))
        deviation = value - mean
        if abs(deviation) < 1e-8:
            return 0.0
        return deviation if algo.normalise == "mean" else deviation / ((std if std > 1e-8 else 1.0) + 1e-6)

    penalty = [0.0 if ok else algo.invalid_penalty for ok in valid]
    scores = [final - penalty[turn] for turn, _, final, _ in rows]
    population = scores if algo.statistics == "steps" else returns
    result = [[0.0, 0.0, 0] for _ in parent]
    for (turn, to_go, _, kept), score in zip(rows, scores, strict=True):
        if not kept:
            continue
        advantage = standardised(score, population)
        alike = [other - penalty[t] for t, other, _, _ in rows if anchors[t] == anchors[turn]]
        if len(alike) > 1:
            advantage += algo.turn_weight * standardised(to_go - penalty[turn], alike)
        result[turn][0 if advantage > 0 else 1] += advantage
        result[turn][2] += 1
    return result


@given(
    random_trees(), st.sampled_from(STATISTICS), st.sampled_from(NORMALISE), st.sampled_from([0.0, 1.0, 0.5]), st.data()
)
def test_gigpo_agrees_with_the_definition_row_by_row(tree, statistics, normalise, weight, data):
    anchors = [data.draw(st.sampled_from("abcd")) for _ in tree[0]]
    cfg = AlgoConfig(statistics=statistics, normalise=normalise, turn_weight=weight, advantage="gigpo")
    got = gigpo(paths(*tree, anchors), cfg)
    for i, (positive, negative, copies) in enumerate(told(*tree, anchors, cfg)):
        assert got.positive[i] == pytest.approx(positive, abs=1e-5)
        assert got.negative[i] == pytest.approx(negative, abs=1e-5)
        assert got.copies[i] == copies


@given(random_trees(), st.sampled_from(MODES))
def test_gigpo_without_weight_or_without_a_state_seen_twice_is_the_groups_advantage(tree, mode):
    without = gigpo(paths(*tree, ["same"] * len(tree[0])), algo(*mode).model_copy(update={"turn_weight": 0.0}))
    group = spark(paths(*tree), algo(*mode))
    np.testing.assert_allclose(without.positive, group.positive)
    chains = paths([-1, 0, -1], [1, 2], [10.0, 0.0])
    np.testing.assert_allclose(gigpo(chains, algo(*mode)).positive, spark(chains, algo(*mode)).positive)


def test_gigpo_by_hand():
    # Two chains from one state; the first wins two turns later, the second loses at once. Rewards to go there 0.95 * 10
    # and 0: mean 4.75, std 6.717514. Group: 10, 10, 0, mean 20 / 3, std 5.773503.
    got = gigpo(paths([-1, 0, -1], [1, 2], [10.0, 0.0], anchors=["s", "t", "s"]), algo())
    np.testing.assert_allclose(got.positive, [0.577350 + 0.707107, 0.577350, 0], atol=1e-5)
    np.testing.assert_allclose(got.negative, [0, 0, -1.154700 - 0.707107], atol=1e-5)


def test_the_penalty_stays_with_its_turn():
    # In the state of both first turns only the reward to go counts, not what the invalid turn after one of them cost.
    same = gigpo(
        paths([-1, 0, -1, 2], [1, 3], [10.0, 10.0], [True, False, True, True], None, ["s", "t", "s", "u"]), algo()
    )
    assert same.positive[0] == pytest.approx(same.positive[2])


def test_states_are_equal_keys_or_similar_ones():
    keys = ["a kitchen with a red mug", "a hall", "a kitchen with a red cup", "a kitchen with a red mug", "a hall!"]
    assert states(keys, 1.0).tolist() == [0, 1, 2, 0, 3]
    assert states(keys, 0.8).tolist() == [0, 1, 0, 0, 1]


@given(st.lists(st.text("ab", min_size=1, max_size=6), max_size=12), st.sampled_from([0.5, 0.8, 0.95]))
def test_a_key_joins_the_first_state_whose_first_key_is_similar_enough(keys, least):
    firsts, expected = [], {}
    for key in keys:
        if key not in expected:
            expected[key] = next(
                (i for i, first in enumerate(firsts) if difflib.SequenceMatcher(None, first, key).ratio() >= least),
                len(firsts),
            )
            firsts += [key] if expected[key] == len(firsts) else []
    assert states(keys, least).tolist() == [expected[key] for key in keys]
