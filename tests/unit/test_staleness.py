"""Lag by cause: the parts add up, in both units, and agree with a count over single turns."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algo.staleness import Lag, expected_lag, split_lags, spread, stale_share

SPANS = {(3, 5): 4, (5, 5): 2, (3, 3): 1}
UPDATES_AT = {3: 12, 4: 14, 5: 20, 6: 24, 7: 25}


@st.composite
def groups(draw: st.DrawFn) -> tuple[dict[tuple[int, int], int], int, int, dict[int, int]]:
    """(spans, driver's version at completion, version at use, updates at each version), as a run may make them."""
    turns = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), min_size=1, max_size=12))
    spans = Counter((first, first + width) for first, width in turns)
    newest = max(last for _, last in spans)
    done = draw(st.integers(max(0, newest - 1), newest + 4))  # the driver's label may come a version later
    trained = max(done, newest) + draw(st.integers(0, 4))
    steps = draw(st.lists(st.integers(0, 5), min_size=trained + 1, max_size=trained + 1))
    return dict(spans), done, trained, {version: sum(steps[: version + 1]) for version in range(trained + 1)}


def test_each_part_of_the_way_has_its_cause() -> None:
    lags = split_lags(SPANS, done=6, trained=7)
    assert lags == {Lag(2, 1, 1): 4, Lag(0, 1, 1): 2, Lag(0, 3, 1): 1}
    assert [lag.total for lag in lags] == [4, 2, 4]  # behind the oldest token, whatever the way was
    assert split_lags({}, done=6, trained=7) == {}


def test_updates_follow_the_counter_of_each_version() -> None:
    lags = split_lags(SPANS, done=6, trained=26, counter=UPDATES_AT)
    assert lags == {Lag(8, 4, 2): 4, Lag(0, 4, 2): 2, Lag(0, 12, 2): 1}


def test_a_token_newer_than_the_drivers_version_moves_the_completion() -> None:
    assert split_lags({(4, 4): 1, (4, 5): 1}, done=4, trained=5) == {Lag(0, 1, 0): 1, Lag(1, 0, 0): 1}


def test_training_before_completion_is_refused() -> None:
    with pytest.raises(ValueError, match="complete at 6 cannot be trained on at 5"):
        split_lags({(6, 6): 10}, done=5, trained=5)
    with pytest.raises(ValueError, match="complete at 6 cannot be trained on at 5"):
        split_lags({(3, 3): 1}, done=6, trained=5)
    with pytest.raises(ValueError, match="complete at 20 cannot be trained on at 19"):
        split_lags(SPANS, done=4, trained=19, counter=UPDATES_AT)


@given(groups())
def test_the_parts_are_exact_and_never_negative(
    group: tuple[dict[tuple[int, int], int], int, int, dict[int, int]],
) -> None:
    spans, done, version, updates_at = group
    for trained, counter in ((version, None), (updates_at[version], updates_at)):
        found = split_lags(spans, done, trained, counter)
        assert all(part >= 0 for lag in found for part in lag)
        slow: Counter[tuple[int, int, int]] = Counter()
        totals: Counter[int] = Counter()
        for (first, last), turns in spans.items():
            for _ in range(turns):  # one turn after another, on the line of versions it passed
                causes = [0, 0, 0]
                for passed in range(first, version):
                    cause = 0 if passed < last else 1 if passed < max(done, *(end for _, end in spans)) else 2
                    causes[cause] += 1 if counter is None else counter[passed + 1] - counter[passed]
                slow[tuple(causes)] += 1  # type: ignore[index]
                totals[trained - (first if counter is None else counter[first])] += 1
        assert found == slow
        summed: Counter[int] = Counter()
        for lag, turns in found.items():
            summed[lag.total] += turns
        assert summed == totals


def test_spread_reaches_from_the_oldest_to_the_newest_token() -> None:
    assert spread([(4, 4)]) == 0
    assert spread([(4, 6)]) == 2
    assert spread([(4, 6), (3, 3), (5, 5)]) == 3


def test_predicted_lag() -> None:
    assert expected_lag(128, 10, 256, 8) == pytest.approx(0.625)
    assert stale_share(0.625) == pytest.approx(0.625 / 1.625)
    assert stale_share(0) == 0
