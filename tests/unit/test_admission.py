"""The lag bound holds under any order of finishing, nothing is thrown away, and nothing waits for ever."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.runtime.admission import Admission


def simulate(groups_per_batch: int, max_lag: int, batches: int, seed: int) -> tuple[list[int], int]:
    """Random finishing order; training takes random time too. Returns the lags at training and the groups admitted."""
    rng = random.Random(seed)
    admission = Admission(groups_per_batch, max_lag)
    version, admitted = 0, 0
    running: dict[int, int] = {}
    ready: dict[int, int] = {}
    training: dict[int, int] = {}
    lags: list[int] = []
    total = batches * groups_per_batch
    while version < batches:
        while admitted < total and admission.may_admit(len(running) + len(ready) + len(training)):
            running[admitted] = version
            admitted += 1
        moves = []
        if running:
            moves.append("finish")
        if training:
            moves.append("publish")
        elif chosen := admission.choose(version, list(ready.items()), running.values()):
            moves.append("train")
        assert moves, "nothing can move: a deadlock"
        move = rng.choice(moves)
        if move == "finish":
            key = rng.choice(sorted(running))
            ready[key] = running.pop(key)
        elif move == "train":
            assert chosen is not None and len(chosen) == groups_per_batch
            training = {key: ready.pop(key) for key in chosen}
            lags += [version - at for at in training.values()]
        else:
            training = {}
            version += 1
    assert not running and not ready
    return lags, admitted


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 5), st.integers(0, 4), st.integers(1, 12), st.integers(0, 2**32))
def test_lag_never_exceeds_the_bound_and_every_group_is_trained_once(
    groups_per_batch: int, max_lag: int, batches: int, seed: int
) -> None:
    lags, admitted = simulate(groups_per_batch, max_lag, batches, seed)
    assert max(lags) <= max_lag
    assert len(lags) == admitted == groups_per_batch * batches


def test_a_late_group_holds_the_batch_that_would_pass_it() -> None:
    admission = Admission(groups_per_batch=2, max_lag=1)
    # Group 0, admitted at version 0, still runs at version 1: its deadline is now, so no batch may go without it.
    assert admission.choose(1, [(2, 1), (3, 1)], running=[0]) is None
    assert admission.choose(1, [(0, 0), (2, 1), (3, 1)], running=[]) == [0, 2]


def test_synchronous_mode_admits_exactly_one_batch() -> None:
    admission = Admission(groups_per_batch=4, max_lag=0)
    assert admission.may_admit(3)
    assert not admission.may_admit(4)
