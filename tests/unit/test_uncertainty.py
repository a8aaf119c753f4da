"""Uncertainty signals against loops in float64, and the properties that the papers claim for them."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from asyncrl.algo.uncertainty import fixed, running, token_signals, turn, turn_signal
from asyncrl.config.thinking import ThinkingConfig
from asyncrl.types import Signals

ALPHA = 0.4
logit = st.floats(-40, 40, allow_nan=False, width=32)
rows = st.integers(2, 24).flatmap(lambda v: st.lists(st.lists(logit, min_size=v, max_size=v), min_size=1, max_size=5))
level = st.floats(0, 12, allow_nan=False, width=32)
series = st.lists(st.tuples(level, level), min_size=1, max_size=30)


def probabilities(logits: list[float]) -> list[float]:
    exact = np.asarray(logits, dtype=np.float64)
    weights = [math.exp(x - max(exact)) for x in exact]
    return [w / math.fsum(weights) for w in weights]


def entropy_of(p: list[float]) -> float:
    return -math.fsum(x * math.log(x) for x in p if x > 0)


def confidence_of(p: list[float], j: int) -> float:
    return -math.fsum(math.log(x) for x in sorted(p, reverse=True)[:j]) / j


def m_of(hs: list[float], cs: list[float], t: int, until: int) -> float:
    """M of token t on the scale of tokens 0..until."""

    def scaled(values: list[float]) -> float:
        low, high = min(values[: until + 1]), max(values[: until + 1])
        return 0.0 if high - low < 1e-8 else (values[t] - low) / (high - low)

    return ALPHA * scaled(hs) + (1 - ALPHA) * (1 - scaled(cs))


def phi_of(ms: list[float]) -> float:
    product = 1.0
    for m in ms:
        product *= max(m, 1e-6) ** (1 / len(ms))
    return product


def told_apart(values: list[float]) -> bool:
    """Its range is none, or clearly beyond float32's rounding."""
    return max(values) == min(values) or max(values) - min(values) > 1e-3


def running_m(hs: torch.Tensor, cs: torch.Tensor) -> torch.Tensor:
    """(sequences, T) from one step at a time."""
    extremes = torch.full((*hs.shape[:-1], 4), torch.inf, dtype=hs.dtype)
    out = []
    for t in range(hs.shape[-1]):
        m, extremes = running(hs[..., t], cs[..., t], extremes, ALPHA)
        out.append(m)
    return torch.stack(out, -1)


@given(rows, st.data())
def test_token_signals_equal_the_sums_they_stand_for(logits, data):
    vocab = len(logits[0])
    j = data.draw(st.integers(2, vocab))
    found = token_signals(torch.tensor(logits, dtype=torch.float32), j)
    for at, row in enumerate(logits):
        p = probabilities(row)
        best = sorted(p, reverse=True)[:10]
        assert float(found.entropy[at]) == pytest.approx(entropy_of(p), abs=1e-5)
        assert float(found.confidence[at]) == pytest.approx(confidence_of(p, j), rel=1e-5)
        assert float(found.p_max[at]) == pytest.approx(max(p), rel=1e-5)
        assert float(found.top_entropy[at]) == pytest.approx(entropy_of(best) / math.log(vocab), abs=1e-5)


@given(rows)
def test_rows_do_not_influence_one_another(logits):
    together = token_signals(torch.tensor(logits), 2)
    for at, row in enumerate(logits):
        for mine, alone in zip(together, token_signals(torch.tensor([row]), 2), strict=True):
            assert torch.equal(mine[at], alone[0])


@pytest.mark.parametrize("vocab", [1_000, 151_936])
def test_a_flat_distribution_is_as_unsure_as_can_be(vocab):
    flat = token_signals(torch.full((1, vocab), 3.0), 20)
    assert float(flat.entropy) == pytest.approx(math.log(vocab), rel=1e-6)
    assert float(flat.confidence) == pytest.approx(math.log(vocab), rel=1e-6)
    assert float(flat.p_max) == pytest.approx(1 / vocab, rel=1e-5)
    assert float(fixed(flat.entropy, flat.p_max, vocab, ALPHA)) == pytest.approx(1.0, abs=2e-3)


def test_near_one_hot_confidence_is_high_and_m_low():
    logits = torch.zeros(2, 151_936)
    logits[1, 77] = 40.0
    found = token_signals(logits, 20)
    assert float(found.confidence[1]) > 3 * float(found.confidence[0])
    assert float(found.confidence[1]) == pytest.approx(40 * 19 / 20, rel=1e-6)
    m = running_m(found.entropy[None], found.confidence[None])[0]
    assert float(m[1]) == pytest.approx(0.0, abs=1e-6)
    assert float(fixed(found.entropy, found.p_max, 151_936, ALPHA)[1]) == pytest.approx(0.0, abs=1e-6)
    # M is high where the policy is unsure: the same two tokens in the other order.
    assert float(running_m(found.entropy.flip(0)[None], found.confidence.flip(0)[None])[0, 1]) == pytest.approx(1.0)


@pytest.mark.parametrize("gap", [5.0, 12.0, 17.0, 25.0])
def test_entropy_of_a_peak_over_a_large_vocabulary(gap):
    logits = torch.zeros(151_936)
    logits[5] = gap
    rest = 151_935 * math.exp(-gap)
    exact = math.log1p(rest) + gap * rest / (1 + rest)
    assert float(token_signals(logits, 20).entropy) == pytest.approx(exact, rel=2e-5, abs=2e-7)


def test_masked_tokens_change_nothing_and_stay_finite():
    logits = torch.tensor([[2.0, 1.0, 0.5]])
    masked = torch.cat([logits, torch.full((1, 30), -torch.inf)], -1)
    plain, other = token_signals(logits, 3), token_signals(masked, 3)
    assert torch.allclose(plain.entropy, other.entropy)
    assert torch.allclose(plain.confidence, other.confidence)
    assert all(torch.isfinite(value).all() for value in token_signals(masked, 20))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_summed_in_float32(dtype):
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(1)).to(dtype)
    for mine, exact in zip(token_signals(logits, 20), token_signals(logits.double(), 20), strict=True):
        assert mine.dtype == torch.float32
        assert torch.allclose(mine.double(), exact, rtol=1e-4)


@pytest.mark.parametrize("j", [0, 1, 4])
def test_j_of_one_or_beyond_the_vocabulary_is_refused(j):
    with pytest.raises(ValueError, match=rf"2\.\.3 .*got {j}"):
        token_signals(torch.zeros(3), j)


def test_top1_is_the_log_prob_of_the_likeliest_token():
    found = token_signals(torch.tensor([2.0, 0.0, 1.0]), None)
    assert float(found.confidence) == pytest.approx(math.log(max(probabilities([2.0, 0.0, 1.0]))))


@given(series)
def test_running_m_is_on_the_scale_of_the_tokens_so_far(tokens):
    hs, cs = ([x[i] for x in tokens] for i in (0, 1))
    found = running_m(torch.tensor(hs), torch.tensor(cs))
    for t in range(len(tokens)):
        if told_apart(hs[: t + 1]) and told_apart(cs[: t + 1]):
            assert float(found[t]) == pytest.approx(m_of(hs, cs, t, until=t), abs=1e-4)
        assert 0 <= float(found[t]) <= 1


@given(series, st.integers(1, 29))
def test_running_m_is_causal(tokens, cut):
    values = torch.tensor(tokens)
    whole, start = (running_m(v[:, 0], v[:, 1]) for v in (values, values[:cut]))
    assert torch.equal(whole[: len(start)], start)


@given(st.lists(series, min_size=1, max_size=4))
def test_turn_m_and_phi_are_on_the_scale_of_the_whole_turn(turns):
    width = max(map(len, turns)) + 2
    mask = torch.tensor([[t < len(x) for t in range(width)] for x in turns])
    # Beyond a turn's end lies whatever the buffer held before: it must not count.
    padded = torch.tensor([list(x) + [(math.inf, -5.0)] * (width - len(x)) for x in turns])
    m = turn(padded[..., 0], padded[..., 1], mask, ALPHA)
    phi = turn_signal(m, mask)
    for at, tokens in enumerate(turns):
        hs, cs = ([x[i] for x in tokens] for i in (0, 1))
        if not (told_apart(hs) and told_apart(cs)):
            continue
        exact = [m_of(hs, cs, t, until=len(tokens) - 1) for t in range(len(tokens))]
        assert m[at, : len(tokens)].tolist() == pytest.approx(exact, abs=1e-4)
        assert float(phi[at]) == pytest.approx(phi_of(m[at, : len(tokens)].double().tolist()), rel=1e-4)


@given(series)
def test_constant_signals_have_constant_m(tokens):
    h, c = tokens[0]
    hs, cs = torch.full((len(tokens),), h), torch.full((len(tokens),), c)
    every = torch.ones(len(tokens), dtype=torch.bool)
    for m in (running_m(hs, cs), turn(hs, cs, every, ALPHA)):
        assert m.tolist() == pytest.approx([1 - ALPHA] * len(tokens))


def test_rounding_is_not_mistaken_for_a_range():
    h = torch.tensor([11.918390, 11.918391, 11.918390, 11.918392])
    assert torch.allclose(running_m(h, torch.full_like(h, 7.0)), torch.tensor(1 - ALPHA))


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=40))
def test_phi_is_a_geometric_mean_that_no_zero_destroys(ms):
    found = float(turn_signal(torch.tensor(ms), torch.ones(len(ms), dtype=torch.bool)))
    assert found == pytest.approx(phi_of(ms), rel=1e-4)
    assert 0.999e-6 <= found <= max(*ms, 1e-6) * 1.001
    assert float(turn_signal(torch.tensor([*ms, 0.5]), torch.tensor([True] * len(ms) + [False]))) == pytest.approx(
        found
    )


def test_phi_of_no_tokens_is_not_a_number():
    assert math.isnan(float(turn_signal(torch.tensor([0.3]), torch.tensor([False]))))


@given(st.floats(0, 12), st.floats(0, 1), st.integers(2, 200_000))
def test_fixed_m_is_the_formula(h, p_max, vocab):
    exact = ALPHA * min(h / math.log(vocab), 1) + (1 - ALPHA) * (1 - p_max)
    assert float(fixed(torch.tensor(h), torch.tensor(p_max), vocab, ALPHA)) == pytest.approx(exact, abs=1e-6)


def test_gamma_is_the_distance_between_two_turns():
    low, high = (Signals(phi, 0, 0, 0, 0, "", (0, 0)) for phi in (0.02, 0.05))
    assert low.gamma(high) == high.gamma(low) == pytest.approx(0.03)


def test_bad_settings_are_refused_by_name():
    for bad, name in [
        ({"top_j": 1}, "confidence=top1"),
        ({"window": 0}, "window"),
        ({"eps": -1e-4}, "eps"),
        ({"alpha": 1.5}, "alpha"),
        ({"min_tokens": 0}, "min_tokens"),
    ]:
        with pytest.raises(ValidationError, match=name):
            ThinkingConfig(**bad)
    assert ThinkingConfig(top_j=1, confidence="top1").top_j == 1
