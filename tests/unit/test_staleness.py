import pytest

from asyncrl.algo.staleness import expected_lag, sibling_spreads, stale_share, summarise, turn_lag, version_spread
from asyncrl.types import VersionSpan
from tests.unit.growing import make_forest, make_turn

SPANS = (VersionSpan(3, 0, 1), VersionSpan(5, 1, 4))


def test_lag_in_versions():
    lag = turn_lag(SPANS, 6)
    assert (lag.first, lag.last, lag.trained, lag.lag) == (3, 5, 6, 3)
    assert lag.token_lag == pytest.approx((3 * 1 + 1 * 3) / 4)


def test_lag_in_updates_follows_the_counter_of_each_version():
    lag = turn_lag(SPANS, 26, counter={3: 12, 5: 20})
    assert (lag.first, lag.last, lag.lag, lag.token_lag) == (12, 20, 14, pytest.approx((14 + 3 * 6) / 4))


def test_a_token_from_the_future_is_refused():
    with pytest.raises(ValueError, match="generated at 5 cannot be trained on at 4"):
        turn_lag(SPANS, 4)
    with pytest.raises(ValueError, match="without version spans"):
        turn_lag((), 4)


def test_summary():
    summary = summarise([turn_lag(SPANS, 6), turn_lag(SPANS, 5), turn_lag((VersionSpan(6, 0, 2),), 6)])
    assert (summary.mean, summary.max) == (pytest.approx(5 / 3), 3)
    assert list(summary.histogram.items()) == [(0, 1), (2, 1), (3, 1)]
    assert summary.token_mean == pytest.approx((1.5 + 0.5 + 0) / 3)


def test_summary_of_nothing():
    summary = summarise([])
    assert (summary.mean, summary.max, summary.token_mean, summary.histogram) == (0, 0, 0, {})


def test_spreads_of_a_group_and_of_its_siblings():
    forest = make_forest(roots=2, branch=3, leaves=4)
    forest.extend(0, make_turn(version=0))
    forest.extend(0, make_turn(version=0))
    [branch] = forest.serve([0])
    for leaf, version in ((0, 1), (branch.children[0], 4), (branch.children[1], 2), (1, 7)):
        forest.extend(leaf, make_turn(version=version, terminated=True))
        forest.finish(leaf, "terminated", success=False)
    nodes = forest.group().nodes
    assert version_spread(nodes) == 8
    assert sibling_spreads(nodes) == [4]
    assert version_spread([]) == 0


def test_predicted_lag():
    assert expected_lag(128, 10, 256, 8) == pytest.approx(0.625)
    assert stale_share(0.625) == pytest.approx(0.625 / 1.625)
    assert stale_share(0) == 0
    with pytest.raises(ValueError, match="must be positive"):
        expected_lag(1, 1, 0, 8)
