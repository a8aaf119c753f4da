"""The plan of a step, and rows laid end to end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.learner.batch import Row, columns, digests, pack, weight
from asyncrl.learner.packing import plan, split_groups
from asyncrl.types import TurnSample, VersionSpan, token_digest

lengths_strategy = st.lists(st.integers(1, 90), max_size=60)


@given(lengths_strategy, st.integers(1, 120), st.integers(1, 5))
def test_plan_keeps_its_promises(lengths: list[int], budget: int, world_size: int) -> None:
    shares = plan(lengths, budget, world_size)
    assert len(shares) == world_size
    assert len({len(share) for share in shares}) == 1
    rows = [row for share in shares for batch in share for row in batch]
    assert sorted(rows) == list(range(len(lengths)))
    for share in shares:
        for batch in share:
            assert len(batch) <= 1 or sum(lengths[row] for row in batch) <= budget
    assert shares == plan(list(lengths), budget, world_size)


@given(st.lists(st.integers(10, 30), min_size=50, max_size=200), st.integers(1, 4))
def test_plan_is_full_and_balanced(lengths: list[int], world_size: int) -> None:
    budget = 300
    shares = plan(lengths, budget, world_size)
    batches = sum(1 for share in shares for batch in share)
    # A micro-batch leaves less than one row (30 tokens) free; the last round may be padded out.
    assert batches <= -(-sum(lengths) // (budget - 30)) + world_size
    loads = [sum(lengths[row] for batch in share for row in batch) for share in shares]
    assert max(loads) - min(loads) <= budget


def test_plan_gives_every_rank_work_when_one_micro_batch_would_do() -> None:
    assert [[len(batch) for batch in share] for share in plan([10] * 8, 1000, 2)] == [[4], [4]]
    assert plan([7], 1000, 2) == [[[0]], [[]]]
    assert plan([], 1000, 2) == [[], []]


@given(st.integers(0, 40), st.integers(1, 8))
def test_groups_are_split_whole(groups: int, steps: int) -> None:
    parts = split_groups(groups, steps)
    assert [i for part in parts for i in part] == list(range(groups))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert len(parts) == max(1, min(steps, groups))


def test_pack_by_hand() -> None:
    packed = pack([Row((5, 6), (7,)), Row((8,), (9, 10))])
    assert packed.input_ids.tolist() == [[5, 6, 7, 8, 9, 10]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 0, 1, 2]]
    assert packed.targets.tolist() == [7, 9, 10]
    assert packed.row.tolist() == [0, 1, 1]


def test_pack_refuses_an_empty_prompt() -> None:
    with pytest.raises(ValueError, match="row 1 has an empty prompt"):
        pack([Row((1,), (2,)), Row((), (2,))])


def sample(prompt: tuple[int, ...], response: tuple[int, ...], mask: tuple[bool, ...], copies: int = 2) -> TurnSample:
    return TurnSample(
        prompt, response, mask, (-0.5,) * len(response), 1.5, -0.5, copies, (VersionSpan(0, 0, len(response)),), 4, 9
    )


def test_columns_follow_the_packed_tokens() -> None:
    samples = [sample((1, 2), (3, 4), (True, False)), sample((1,), (5,), (True,), copies=3)]
    got = columns(samples)
    assert got.copies.tolist() == [2, 0, 3]
    assert got.behaviour.tolist() == [-0.5] * 3
    assert got.advantage_pos.tolist() == [1.5] * 3
    assert weight(samples) == 2 + 3 == got.copies.sum()


def test_columns_name_a_ragged_sample() -> None:
    with pytest.raises(ValueError, match="group 4, node 9"):
        columns([sample((1,), (2, 3), (True,))])


def test_digests_read_the_packed_tensor() -> None:
    packed = pack([Row((1, 2), (3, 4, 5)), Row((1,), ()), Row((1,), (6,))])
    assert digests(packed) == [token_digest([3, 4, 5]), token_digest([]), token_digest([6])]
    packed.input_ids[0, 2] = 77
    assert digests(packed)[0] == token_digest([77, 4, 5])
