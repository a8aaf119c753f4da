from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algo.samples import group_paths, turn_samples
from asyncrl.config.algo import AlgoConfig
from asyncrl.config.tree import TreeConfig
from asyncrl.tree.forest import Forest
from asyncrl.types import VersionSpan, token_digest
from tests.unit.growing import TASK, grow, make_forest, make_turn


def branched_group(success=(True, False), valid=True):
    """A shared turn with one leaf each side."""
    forest = make_forest(roots=1, branch=2, leaves=2)
    forest.extend(0, make_turn(valid=valid))
    forest.serve([0])
    for leaf in (0, 1):
        forest.extend(leaf, make_turn(terminated=True))
        forest.finish(leaf, success[leaf])
    return forest.group()


def test_each_node_is_one_row_with_the_engines_own_tokens():
    group = branched_group()
    samples = turn_samples(group, AlgoConfig())
    assert [sample.node for sample in samples] == [node.id for node in group.nodes]
    for node, sample in zip(group.nodes, samples, strict=True):
        assert sample.response_ids is node.turn.generation.token_ids
        assert sample.logprobs is node.turn.generation.logprobs
        assert sample.prompt_ids is node.turn.prompt_ids
        assert sample.spans is node.turn.generation.spans
        assert sample.loss_mask == (True,) * 3
        assert sample.digest == node.turn.generation.digest == token_digest(sample.response_ids)
        assert sample.group == group.key
    assert [sample.copies for sample in samples] == [2, 1, 1]


def test_success_earns_the_configured_reward_whatever_the_environment_paid():
    samples = turn_samples(branched_group(), AlgoConfig(success_reward=4.0, normalise="mean"))
    assert [(s.advantage_pos, s.advantage_neg) for s in samples] == [(2.0, -2.0), (2.0, 0.0), (0.0, -2.0)]


def test_prefix_mean_trains_a_shared_turn_once():
    samples = turn_samples(branched_group(), AlgoConfig(normalise="mean", prefix="mean"))
    assert [(s.advantage_pos, s.advantage_neg, s.copies) for s in samples] == [(0, 0, 1), (5.0, 0, 1), (0, -5.0, 1)]


@given(st.integers(0, 2**32))
def test_advantages_of_a_group_add_up_to_nothing_over_its_copies(seed):
    rng = Random(seed)
    cfg = TreeConfig(roots=3, branch=3, leaves=7)
    group = grow(Forest(TASK, 0, cfg, rng), rng, lose=0.05, fail=0.2).group()
    samples = turn_samples(group, AlgoConfig())
    assert len(samples) == len(group.nodes)
    assert sum(s.copies for s in samples) == sum(len(group.path(leaf)) for leaf in group.leaves)
    if sum(s.copies for s in samples) > 1:
        assert sum(s.advantage_pos + s.advantage_neg for s in samples) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("group", "signal"),
    [
        (branched_group((True, False)), True),
        (branched_group((True, True)), False),
        (branched_group((False, False)), False),
        (branched_group((False, False), valid=False), True),
    ],
)
def test_only_unequal_scores_give_advantages(group, signal):
    samples = turn_samples(group, AlgoConfig())
    assert any(sample.advantage_pos or sample.advantage_neg for sample in samples) is signal


def test_an_empty_group_has_no_rows():
    forest = make_forest(roots=1, leaves=1)
    forest.lose(0, "SlotLost")
    assert turn_samples(forest.group(), AlgoConfig()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logprobs": (-1.0,)}, "3 response ids but 1 log-probs"),
        ({"logprobs": (-1.0, float("nan"), -1.0)}, "log-prob is not finite"),
        ({"token_ids": (), "logprobs": (), "spans": ()}, "needs prompt and response ids, got 2 and 0"),
        ({"spans": ()}, "must cover 0..3"),
        ({"spans": (VersionSpan(0, 0, 2),)}, "must cover 0..3"),
        ({"spans": (VersionSpan(0, 0, 1), VersionSpan(0, 2, 3))}, "without gaps"),
        ({"spans": (VersionSpan(1, 0, 1), VersionSpan(0, 1, 3))}, "never decrease"),
    ],
)
def test_a_turn_that_does_not_line_up_is_refused_by_name(change, message):
    group = branched_group()
    node = group.nodes[1]
    group.nodes[1] = replace(node, turn=replace(node.turn, generation=replace(node.turn.generation, **change)))
    with pytest.raises(ValueError, match=message) as error:
        turn_samples(group, AlgoConfig())
    assert "group 11 (toy task 7), node 1" in str(error.value)


# -- what shapes and filters a leaf ------------------------------------------------------------------------------------


def unequal_group(lengths=((4, True), (9, True), (6, False), (2, False)), void=None):
    """One turn a leaf, of so many tokens and with such an end; the leaf ``void`` says nothing to execute."""
    forest = make_forest(roots=len(lengths), leaves=len(lengths))
    for leaf, (tokens, success) in enumerate(lengths):
        turn = make_turn(terminated=True, tokens=tokens)
        forest.extend(leaf, replace(turn, parsed=replace(turn.parsed, void=leaf == void)))
        forest.finish(leaf, success)
    return forest.group()


@pytest.mark.parametrize(
    ("penalty_on", "valid", "action", "listed", "in_order"),
    [
        ("valid", True, "go Hall", ("look", "go hall"), True),  # the release lowers both
        ("valid", True, "fly", ("look", "go hall"), False),
        ("valid", False, "look", ("look", "go hall"), False),
        ("valid", True, "fly", None, True),
        ("valid", True, "fly", (), False),
        ("format", True, "fly", ("look", "go hall"), True),
        ("format", False, "look", ("look", "go hall"), False),
    ],
)
def test_what_the_penalty_is_on(penalty_on, valid, action, listed, in_order):
    forest = make_forest(roots=2, leaves=2)
    for leaf in range(2):
        turn = make_turn(action=action, valid=valid, terminated=True)
        forest.extend(leaf, replace(turn, observation=replace(turn.observation, actions=listed)))
        forest.finish(leaf, success=leaf == 0)
    cfg = AlgoConfig(penalty_on=penalty_on, normalise="mean", success_reward=1)
    assert group_paths(forest.group(), cfg).in_order.tolist() == [in_order] * 2


def test_the_length_reward_by_hand():
    # Shortest 2, longest 9: 0.5 - 2/7, 0.5 - 1 for the successes; min(0, 0.5 - 4/7) and min(0, 0.5) for the failures.
    paths = group_paths(unequal_group(), AlgoConfig(success_reward=10, length_reward=2))
    assert paths.returns == pytest.approx([10 + 2 * (0.5 - 2 / 7), 10 - 1.0, 2 * (0.5 - 4 / 7), 0.0])
    same = group_paths(unequal_group([(5, True), (5, False)]), AlgoConfig(length_reward=1))
    assert same.returns.tolist() == [10.0, 0.0]


def test_the_length_of_a_path_is_that_of_all_its_turns():
    group = branched_group()  # three tokens a turn, two turns a path
    longer = group.nodes[2]
    tokens = make_turn(tokens=7, terminated=True)
    group.nodes[2] = replace(longer, turn=tokens)
    assert group_paths(group, AlgoConfig(length_reward=1)).returns.tolist() == [10.5, -0.5]


def test_a_void_path_is_not_trained_but_counts_in_the_statistics():
    group = unequal_group(void=2)
    free = turn_samples(group, AlgoConfig())
    filtered = turn_samples(group, AlgoConfig(void_filter=True))
    assert [sample.copies for sample in filtered] == [1, 1, 0, 1]
    assert (filtered[2].advantage_pos, filtered[2].advantage_neg) == (0, 0)
    kept = [0, 1, 3]
    assert [filtered[i] for i in kept] == [free[i] for i in kept]
