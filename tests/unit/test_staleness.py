import pytest

from asyncrl.algo.staleness import expected_lag, lags, stale_share

SPANS = {(3, 5): 4, (5, 5): 2, (3, 3): 1, (6, 6): 10}


def test_a_turn_lags_as_its_oldest_token_does():
    assert lags(SPANS, 6) == {3: 5, 1: 2, 0: 10}
    assert lags({}, 6) == {}


def test_lags_in_updates_follow_the_counter_of_each_version():
    assert lags(SPANS, 26, counter={3: 12, 5: 20, 6: 24}) == {14: 5, 6: 2, 2: 10}


def test_a_token_from_the_future_is_refused():
    with pytest.raises(ValueError, match="generated at 6 cannot be trained on at 5"):
        lags(SPANS, 5)
    with pytest.raises(ValueError, match="generated at 20 cannot be trained on at 19"):
        lags({(3, 5): 1}, 19, counter={3: 12, 5: 20})


def test_predicted_lag():
    assert expected_lag(128, 10, 256, 8) == pytest.approx(0.625)
    assert stale_share(0.625) == pytest.approx(0.625 / 1.625)
    assert stale_share(0) == 0
    with pytest.raises(ValueError, match="must be positive"):
        expected_lag(1, 1, 0, 8)
