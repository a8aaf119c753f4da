from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.tree import TreeConfig
from asyncrl.tree.forest import Forest, ForestError, LeafState
from tests.unit.growing import TASK, grow, make_forest, make_turn


@st.composite
def shapes(draw, min_branch=1):
    roots = draw(st.integers(1, 5))
    return TreeConfig(
        roots=roots,
        branch=draw(st.integers(min_branch, 4)),
        leaves=roots + draw(st.integers(0, 8)),
        criterion="explore",
    )


seeds = st.integers(0, 2**32)
shares = st.floats(0, 1)


def budget_holds(forest: Forest) -> None:
    states = Counter(forest.state(leaf) for leaf in range(len(forest._leaves)))
    taken = sum(states.values()) - states[LeafState.RELEASED]
    assert taken == forest.used <= forest.cfg.leaves
    made = forest.cfg.roots + forest.counters["children"]
    assert sum(states.values()) == made
    assert states[LeafState.RELEASED] == forest.counters["discarded"]
    assert states[LeafState.LOST] == forest.counters["lost"]


# -- the leaf budget -----------------------------------------------------------------------------------------------


@given(shapes(), seeds, shares, st.floats(0.05, 1))
def test_group_size_lies_between_roots_and_budget(cfg, seed, explore, end):
    forest = grow(Forest(TASK, 0, cfg, Random(seed)), Random(seed + 1), explore=explore, end=end, check=budget_holds)
    group = forest.group()
    assert cfg.roots <= len(group.leaves) <= cfg.leaves
    assert {leaf.tree for leaf in group.leaves} == set(range(cfg.roots))


@given(shapes(min_branch=2), seeds)
def test_exactly_the_budget_when_every_step_explores_and_episodes_are_long(cfg, seed):
    forest = Forest(TASK, 0, cfg, Random(seed))
    grow(forest, Random(seed + 1), explore=1, end=0, max_turns=cfg.leaves + 2, check=budget_holds)
    assert len(forest.group().leaves) == cfg.leaves
    assert forest.counters["denied"] == forest.counters["triggers"] - forest.counters["branches"]


@given(shapes(), seeds, shares, st.floats(0, 0.9), st.floats(0, 0.4))
def test_budget_holds_under_failures_and_no_failed_leaf_enters_the_group(cfg, seed, explore, fail, lose):
    forest = Forest(TASK, 0, cfg, Random(seed))
    grow(forest, Random(seed + 1), explore=explore, fail=fail, lose=lose, check=budget_holds)
    group = forest.group()
    assert (
        len(group.leaves)
        == cfg.roots + forest.counters["children"] - forest.counters["discarded"] - (forest.counters["lost"])
    )
    assert len(group.leaves) + forest.counters["lost"] >= cfg.roots
    on_paths = {node.id for leaf in group.leaves for node in group.path(leaf)}
    assert [node.id for node in group.nodes] == sorted(on_paths)
    denied = sum(count for name, count in forest.counters.items() if name.startswith("denied_depth_"))
    assert denied == forest.counters["denied"]


@pytest.mark.parametrize(
    ("branch", "leaves", "children"), [(2, 8, 1), (4, 8, 3), (4, 4, 2), (4, 3, 1), (3, 2, 0), (1, 8, 0)]
)
def test_a_branch_makes_as_many_children_as_b_and_the_budget_allow(branch, leaves, children):
    forest = make_forest(roots=2, branch=branch, leaves=leaves)
    forest.extend(0, make_turn())
    assert len(forest.serve([0]).get(0, ())) == children
    assert forest.used == 2 + children
    assert forest.counters["curtailed"] == (0 < children < branch - 1)
    assert forest.counters["denied_depth_0"] == (children == 0 and branch > 1)


def test_finished_leaves_still_count():
    forest = make_forest(roots=2, branch=2, leaves=2)
    forest.extend(0, make_turn(terminated=True))
    forest.finish(0, success=True)
    forest.extend(1, make_turn())
    assert forest.serve([1]) == {}
    assert forest.counters["denied_depth_0"] == 1


def test_simultaneous_triggers_are_served_in_random_order():
    winners: Counter[int] = Counter()
    for seed in range(400):
        forest = make_forest(roots=4, branch=2, leaves=5, seed=seed)
        for leaf in forest.live():
            forest.extend(leaf, make_turn())
        winners.update(forest.serve(forest.live()).keys())
    assert all(60 <= winners[leaf] <= 140 for leaf in range(4)), winners


def test_triggers_of_separate_calls_are_served_in_order_of_arrival():
    forest = make_forest(roots=2, branch=2, leaves=3)
    for leaf in (0, 1):
        forest.extend(leaf, make_turn())
    assert forest.serve([1]) == {1: (2,)}
    assert forest.serve([0]) == {}


def test_a_released_child_gives_its_slot_back_and_a_lost_leaf_does_not():
    forest = make_forest(roots=1, branch=2, leaves=2)
    forest.extend(0, make_turn())
    [child] = forest.serve([0])[0]
    forest.release(child, "replay_mismatch")
    assert (forest.used, forest.counters["discarded_replay_mismatch"]) == (1, 1)
    forest.extend(0, make_turn())
    [child] = forest.serve([0])[0]
    forest.extend(child, make_turn())
    forest.lose(child, "SlotLost")
    assert (forest.used, forest.counters["lost_SlotLost"]) == (2, 1)
    forest.extend(0, make_turn())
    assert forest.serve([0]) == {}


def test_a_child_lost_before_its_first_turn_is_released():
    forest = make_forest(roots=1, branch=2, leaves=2)
    forest.extend(0, make_turn())
    [child] = forest.serve([0])[0]
    forest.lose(child, "GenerationFailed")
    assert forest.state(child) is LeafState.RELEASED
    assert (forest.counters["discarded_GenerationFailed"], forest.counters["lost"]) == (1, 0)


# -- the shape of the tree -----------------------------------------------------------------------------------------


def test_a_child_shares_its_parents_path_and_goes_its_own_way():
    forest = make_forest(roots=1, branch=2, leaves=3)
    first = forest.extend(0, make_turn("start", "a"))
    [child] = forest.serve([0])[0]
    assert forest.path(child) == [first]
    mine, its = forest.extend(0, make_turn("a", "b")), forest.extend(child, make_turn("a", "c"))
    assert (mine.parent, its.parent, its.depth, its.tree) == (first.id, first.id, 1, 0)
    assert (forest.path(0), forest.path(child)) == ([first, mine], [first, its])


def test_the_shared_path_stays_in_the_group_when_only_the_child_finishes():
    forest = make_forest(roots=1, branch=2, leaves=2)
    shared = forest.extend(0, make_turn(reward=1.5))
    [child] = forest.serve([0])[0]
    forest.extend(0, make_turn())
    forest.lose(0, "SlotLost")
    own = forest.extend(child, make_turn(reward=2.0, truncated=True))
    forest.finish(child, success=False)
    group = forest.group(seconds=3.0)
    [leaf] = group.leaves
    assert [node.id for node in group.nodes] == [shared.id, own.id]
    assert (leaf.id, leaf.node, leaf.reward, leaf.success, leaf.end) == (child, own.id, 3.5, False, "truncated")
    assert (group.counters["turns_dropped"], group.counters["lost"], group.seconds) == (1, 1, 3.0)


@pytest.mark.parametrize(
    ("flags", "end"),
    [({"terminated": True, "truncated": True}, "terminated"), ({"truncated": True}, "truncated"), ({}, "turn_limit")],
)
def test_a_leaf_ends_as_its_last_turn_says(flags, end):
    forest = make_forest(roots=1, leaves=1)
    forest.extend(0, make_turn())
    forest.extend(0, make_turn(**flags))
    forest.finish(0, success=True)
    assert [(leaf.end, leaf.success) for leaf in forest.group().leaves] == [(end, True)]


def test_a_group_without_a_finished_leaf_is_empty():
    forest = make_forest(roots=1, leaves=1)
    forest.lose(0, "SlotLost")
    assert not forest.live()
    assert (forest.group().leaves, forest.group().nodes) == ([], [])


# -- what the forest refuses ---------------------------------------------------------------------------------------


def ended(forest):
    forest.extend(0, make_turn(terminated=True))


def finished(forest):
    ended(forest)
    forest.finish(0, success=True)


def reserved(forest):
    forest.extend(0, make_turn())
    forest.serve([0])


@pytest.mark.parametrize(
    ("before", "call", "message"),
    [
        (ended, lambda f: f.extend(0, make_turn()), "its episode ended at node 0; finish"),
        (ended, lambda f: f.serve([0]), "cannot branch: its episode ended"),
        (finished, lambda f: f.extend(0, make_turn()), r"\(finished\) cannot take another turn"),
        (finished, lambda f: f.serve([0]), "only an active leaf can"),
        (finished, lambda f: f.finish(0, True), "only an active leaf can"),
        (finished, lambda f: f.lose(0, "SlotLost"), "it has ended"),
        (finished, lambda f: f.group(), r"leaves \[1\] are still to end"),
        (reserved, lambda f: f.serve([2]), r"\(reserved\) cannot branch"),
        (reserved, lambda f: f.serve([0]), "already served at node 0"),
        (reserved, lambda f: f.release(0, "x"), "only a child before its first turn"),
        (reserved, lambda f: f.release(2, "a sentence"), "must be one word"),
        (reserved, lambda f: f.finish(2, False), "only an active leaf can"),
        (reserved, lambda f: f.extend(3, make_turn()), "no leaf 3; ids run from 0 to 2"),
        (lambda f: None, lambda f: f.serve([1]), "before its first turn"),
        (lambda f: None, lambda f: f.finish(1, False), "before its first turn"),
        (lambda f: None, lambda f: f.serve([0, 0]), "twice among the triggers"),
    ],
)
def test_illegal_transitions_are_refused_and_change_nothing(before, call, message):
    forest = make_forest()
    before(forest)
    state = [forest.state(leaf) for leaf in range(forest.used)], dict(forest.counters), len(forest._nodes)
    with pytest.raises(ForestError, match=message) as error:
        call(forest)
    assert "forest 11 of toy task 7" in str(error.value)
    assert state == ([forest.state(leaf) for leaf in range(forest.used)], dict(forest.counters), len(forest._nodes))


def test_one_bad_trigger_stops_its_whole_batch():
    forest = make_forest()
    forest.extend(0, make_turn())
    with pytest.raises(ForestError):
        forest.serve([0, 1])
    assert forest.counters["triggers"] == 0
    assert forest.serve([0]) == {0: (2,)}
