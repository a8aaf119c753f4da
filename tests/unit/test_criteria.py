from random import Random

import pytest

from asyncrl.config.tree import TreeConfig
from asyncrl.tree.criteria import make_criterion
from tests.unit.growing import make_turn


def test_explore_follows_the_policy_even_in_an_invalid_response():
    criterion = make_criterion(TreeConfig(criterion="explore"), Random(0))
    assert criterion(make_turn(explores=True))
    assert criterion(make_turn(explores=True, valid=False))
    assert not criterion(make_turn(explores=False))


@pytest.mark.parametrize("p", [0.0, 0.1, 1.0])
def test_bernoulli_triggers_at_its_rate_whatever_the_turn_says(p):
    criterion = make_criterion(TreeConfig(criterion="bernoulli", p=p), Random(0))
    rate = sum(criterion(make_turn(explores=i % 2 == 0)) for i in range(4000)) / 4000
    assert rate == pytest.approx(p, abs=0.02)


def test_bernoulli_is_reproducible():
    cfg = TreeConfig(criterion="bernoulli", p=0.5)
    one, other = make_criterion(cfg, Random(5)), make_criterion(cfg, Random(5))
    assert [one(make_turn()) for _ in range(50)] == [other(make_turn()) for _ in range(50)]


@pytest.mark.parametrize(
    "cfg",
    [
        TreeConfig(criterion="none"),
        TreeConfig(criterion="explore", branch=1),
        TreeConfig(criterion="bernoulli", p=1.0, roots=4, leaves=4),
    ],
)
def test_nothing_triggers_where_the_shape_leaves_no_room(cfg):
    assert not make_criterion(cfg, Random(0))(make_turn(explores=True))
