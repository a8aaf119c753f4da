"""The deduplicated loss against the copies it stands for, computed one by one."""

import dataclasses
import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algo.loss import Columns, cross_entropy, k3, policy_loss
from asyncrl.config.algo import AlgoConfig

finite = {"allow_nan": False, "allow_infinity": False}
token = st.fixed_dictionaries(
    {
        "logprob": st.floats(-6, 0, **finite),
        "behaviour": st.floats(-6, 0, **finite),
        "reference": st.floats(-6, 0, **finite),
        "entropy": st.floats(0, 6, **finite),
        "advantages": st.lists(st.floats(-3, 3, **finite), max_size=5),
    }
)


class Tokens(NamedTuple):
    columns: Columns
    logprobs: torch.Tensor
    entropy: torch.Tensor
    reference: torch.Tensor


def tensors(tokens: list[dict]) -> Tokens:
    def column(values: list[float], grad: bool = False) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, requires_grad=grad)

    return Tokens(
        Columns(
            behaviour=column([t["behaviour"] for t in tokens]),
            advantage_pos=column([sum(max(a, 0) for a in t["advantages"]) for t in tokens]),
            advantage_neg=column([sum(min(a, 0) for a in t["advantages"]) for t in tokens]),
            copies=column([len(t["advantages"]) for t in tokens]),
            turn=torch.arange(len(tokens)),
        ),
        logprobs=column([t["logprob"] for t in tokens], grad=True),
        entropy=column([t["entropy"] for t in tokens], grad=True),
        reference=column([t["reference"] for t in tokens]),
    )


def per_copy(tokens: list[dict], logprobs: torch.Tensor, entropy: torch.Tensor, algo: AlgoConfig) -> torch.Tensor:
    """PPO's dual-clip loss written copy by copy, token by token."""
    total = torch.zeros((), dtype=torch.float64)
    for i, t in enumerate(tokens):
        for a in t["advantages"]:
            ratio = torch.exp(logprobs[i] - t["behaviour"])
            bounded = torch.clamp(ratio, 1 - algo.clip_low, 1 + algo.clip_high)
            loss = torch.maximum(-a * ratio, -a * bounded)
            if a < 0:
                loss = torch.minimum(loss, torch.tensor(-a * algo.dual_clip, dtype=torch.float64))
            d = t["reference"] - logprobs[i]
            total = total + loss + algo.kl_coef * torch.clamp(torch.exp(d) - d - 1, -10, 10)
            total = total - algo.entropy_coef * entropy[i]
    return total


def on_a_kink(t: dict, algo: AlgoConfig) -> bool:
    """Where the loss has a corner its gradient is a matter of convention, so neither side is wrong."""
    ratio = math.exp(t["logprob"] - t["behaviour"])
    d = t["reference"] - t["logprob"]
    corners = (1 - algo.clip_low, 1 + algo.clip_high, algo.dual_clip)
    return any(abs(ratio - c) < 1e-9 for c in corners) or abs(math.exp(d) - d - 1 - 10) < 1e-9


@settings(max_examples=60)
@given(
    st.lists(token, min_size=1, max_size=6),
    st.floats(0.05, 0.5, **finite),
    st.floats(0.05, 0.5, **finite),
    st.floats(1.6, 5, **finite),
)
def test_equals_the_loss_of_the_copies(tokens: list[dict], low: float, high: float, ceiling: float) -> None:
    algo = AlgoConfig(clip_low=low, clip_high=high, dual_clip=ceiling, kl_coef=0.3, entropy_coef=0.2)
    tokens = [t for t in tokens if not on_a_kink(t, algo)]
    ours = tensors(tokens)
    part = policy_loss(*ours, algo)
    part.total.backward()

    oracle = tensors(tokens)
    expected = per_copy(tokens, oracle.logprobs, oracle.entropy, algo)
    assert part.weight == sum(len(t["advantages"]) for t in tokens)
    torch.testing.assert_close(part.total, expected, rtol=1e-9, atol=1e-9)
    if not part.weight:
        assert not tokens or not ours.logprobs.grad.any()
        return
    expected.backward()
    torch.testing.assert_close(ours.logprobs.grad, oracle.logprobs.grad, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(ours.entropy.grad, oracle.entropy.grad, rtol=1e-9, atol=1e-9)


@settings(max_examples=30)
@given(st.lists(token, min_size=2, max_size=8), st.data())
def test_any_split_adds_up(tokens: list[dict], data: st.DataObject) -> None:
    algo = AlgoConfig(kl_coef=0.1, entropy_coef=0.1)
    cut = data.draw(st.integers(0, len(tokens)))
    whole = policy_loss(*tensors(tokens), algo)
    parts = [policy_loss(*tensors(tokens[:cut]), algo), policy_loss(*tensors(tokens[cut:]), algo)]
    assert whole.weight == sum(part.weight for part in parts)
    torch.testing.assert_close(whole.total, parts[0].total + parts[1].total)
    for name, value in whole.sums.items():
        assert value == pytest.approx(sum(part.sums[name] for part in parts), abs=1e-9)


def test_untrained_tokens_add_nothing_even_with_an_advantage() -> None:
    silent = {"logprob": -30.0, "behaviour": 0.0, "reference": -5.0, "entropy": 3.0, "advantages": [2.0, -1.0]}
    tokens = tensors([silent])
    masked = dataclasses.replace(tokens.columns, copies=torch.zeros(1, dtype=torch.float64))
    part = policy_loss(masked, *tokens[1:], AlgoConfig(kl_coef=0.1, entropy_coef=0.1))
    part.total.backward()
    assert part.total.item() == 0 and part.weight == 0
    assert not tokens.logprobs.grad.any() and not tokens.entropy.grad.any()
    assert part.maxima["ratio_max"] == 0


def test_extreme_log_ratios_stay_finite() -> None:
    far = {"logprob": -1e4, "behaviour": 0.0, "reference": 1e4, "entropy": 0.0, "advantages": [1.0, -1.0]}
    near = {"logprob": 0.0, "behaviour": -1e4, "reference": -1e4, "entropy": 0.0, "advantages": [1.0, -1.0]}
    tokens = tensors([far, near])
    part = policy_loss(*tokens, AlgoConfig())
    part.total.backward()
    assert torch.isfinite(part.total) and torch.isfinite(tokens.logprobs.grad).all()


def test_diagnostics_by_hand() -> None:
    # Ratios 1.5, 0.5 and 4: above the clip with a gain, below it with a cost, beyond the dual clip with a cost.
    tokens = [
        {"logprob": math.log(r), "behaviour": 0.0, "reference": math.log(r), "entropy": 1.0, "advantages": a}
        for r, a in ((1.5, [1.0]), (0.5, [-1.0, -1.0]), (4.0, [-1.0]), (1.0, [1.0, -1.0]))
    ]
    part = policy_loss(*tensors(tokens), AlgoConfig(kl_coef=0, entropy_coef=0))
    assert part.weight == 6
    assert [part.sums[name] for name in ("clipped", "clipped_low", "clipped_high")] == [4, 2, 1]
    assert part.sums["ratio"] == pytest.approx(1.5 + 2 * 0.5 + 4 + 2)
    assert part.maxima["ratio_max"] == pytest.approx(4)
    assert part.sums["policy_loss"] == pytest.approx(-1.2 + 2 * 0.8 + 3 + 0)


def test_k3_is_zero_at_equality_and_cut_far_away() -> None:
    assert k3(torch.tensor([-1.0]), torch.tensor([-1.0])).item() == 0
    assert k3(torch.tensor([-50.0]), torch.tensor([0.0])).item() == 10


def test_cross_entropy_counts_only_trained_tokens() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -4.0], requires_grad=True)
    part = cross_entropy(logprobs, torch.tensor([1.0, 0.0, 1.0]))
    part.total.backward()
    assert part.total.item() == 5 and part.weight == 2
    assert logprobs.grad.tolist() == [-1, 0, -1]
