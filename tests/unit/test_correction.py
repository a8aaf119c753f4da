"""Off-policy correction against a transcription that walks over leaves and tokens in plain floats."""

import dataclasses
import math
from collections import defaultdict
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from asyncrl.algo.loss import Columns, LossSum, policy_loss
from asyncrl.config.algo import AlgoConfig
from asyncrl.config.load import ConfigError, validate
from asyncrl.learner.batch import PADDING, columns
from asyncrl.learner.report import RankReport, merge
from asyncrl.types import TurnSample

numbers = {"allow_nan": False, "allow_infinity": False}
logprob = st.floats(-2.2, 0, **numbers)  # no k3 divergence reaches its limit
Turn = dict[str, Any]

token = st.fixed_dictionaries(
    {
        "now": logprob,
        "start": logprob,
        "behaviour": logprob,
        "reference": logprob,
        "entropy": st.floats(0, 4, **numbers),
        "sampled": st.booleans(),
    }
)
turn = st.fixed_dictionaries(
    {"tokens": st.lists(token, max_size=5), "leaves": st.lists(st.floats(-3, 3, **numbers), max_size=4)}
)
algos = st.builds(
    AlgoConfig,
    proximal=st.just("recomputed"),
    weights=st.sampled_from(["none", "token", "sequence"]),
    weight_cap=st.floats(1, 4, **numbers),
    reject=st.sampled_from(["none", "token", "sequence"]),
    reject_low=st.floats(0, 0.9, **numbers),
    reject_high=st.floats(1.1, 5, **numbers),
    kl_coef=st.just(0.3),
    entropy_coef=st.just(0.2),
) | st.builds(
    AlgoConfig,
    reject=st.sampled_from(["token", "sequence"]),
    reject_low=st.floats(0, 0.9, **numbers),
    reject_high=st.floats(1.1, 5, **numbers),
    kl_coef=st.just(0.3),
    entropy_coef=st.just(0.2),
)


def tensors(turns: list[Turn], algo: AlgoConfig, first: bool) -> tuple[Columns, torch.Tensor, torch.Tensor, Any]:
    """Columns, log-probs and entropy with a gradient, reference; ``first``: of a batch's first step."""
    pairs = [(t, i) for i, t in enumerate(turns) for _ in t["tokens"]]
    tokens = [token for t in turns for token in t["tokens"]]
    starts = [sum(len(t["tokens"]) for t in turns[:i]) for i in range(len(turns))]

    def column(values: list[float], grad: bool = False) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, requires_grad=grad)

    known = Columns(
        behaviour=column([t["behaviour"] for t in tokens]),
        advantage_pos=column([sum(max(a, 0) for a in t["leaves"]) for t, _ in pairs]),
        advantage_neg=column([sum(min(a, 0) for a in t["leaves"]) for t, _ in pairs]),
        copies=column([len(t["leaves"]) * k["sampled"] for (t, _), k in zip(pairs, tokens, strict=True)]),
        turn=torch.tensor([starts[i] for _, i in pairs], dtype=torch.int64),
        proximal=None if first or algo.proximal == "behaviour" else column([t["start"] for t in tokens]),
    )
    now, entropy = (column([t[name] for t in tokens], grad=True) for name in ("now", "entropy"))
    return known, now, entropy, column([t["reference"] for t in tokens])


def near(a: float, b: float) -> bool:
    return abs(a - b) < 1e-9


def slow(turns: list[Turn], algo: AlgoConfig, first: bool) -> tuple[float, list[float], dict[str, float]]:
    """Loss, its derivative by each log-prob, and diagnostics, leaf by leaf and token by token.

    ``kinks`` counts tokens on a corner or a threshold, where neither side would be wrong.
    """
    loss, slopes = 0.0, []
    sums: dict[str, float] = defaultdict(float)
    for t in turns:
        sampled = [k for k in t["tokens"] if k["sampled"]]
        ratios = []
        for k in sampled:
            own = k["now"] if first or algo.proximal == "behaviour" else k["start"]
            ratios.append(math.exp(own) / math.exp(k["behaviour"]))
        product = math.prod(ratios)
        mean = product ** (1 / len(ratios)) if ratios else 1.0
        at = 0
        for k in t["tokens"]:
            if not k["sampled"]:
                slopes.append(0.0)
                continue
            own = ratios[at]
            at += 1
            level = {"none": 1.0, "token": own, "sequence": mean}[algo.reject]
            rejected = algo.reject != "none" and not algo.reject_low <= level <= algo.reject_high
            weight = {"none": 1.0, "token": own, "sequence": product}[algo.weights]
            capped = algo.weights != "none" and weight > algo.weight_cap
            weight = algo.weight_cap if capped else weight
            sums["kinks"] += any(near(level, bound) for bound in (algo.reject_low, algo.reject_high))
            sums["kinks"] += near({"token": own, "sequence": product}.get(algo.weights, 0), algo.weight_cap)
            if algo.proximal == "behaviour":
                ratio = math.exp(k["now"]) / math.exp(k["behaviour"])
            else:
                ratio = 1.0 if first else math.exp(k["now"]) / math.exp(k["start"])
            sums["kinks"] += any(near(ratio, 1 + x) for x in (-algo.clip_low, algo.clip_high, algo.dual_clip - 1))
            slope, flat = 0.0, set()
            for a in t["leaves"]:
                sums["log_ratio"] += math.log(own)
                sums["rejected"] += rejected
                sums["capped"] += capped and not rejected
                sums["weight"] += 0.0 if rejected else weight
                sums["importance"] += 0.0 if rejected else weight * ratio
                sums["importance_sq"] += 0.0 if rejected else (weight * ratio) ** 2
                d = k["reference"] - k["now"]
                sums["kl_reference"] += math.exp(d) - d - 1
                sums["entropy"] += k["entropy"]
                since = k["now"] - k["behaviour"]
                sums["kl_behaviour"] += math.exp(since) - 1 - since
                if rejected:
                    continue
                if a >= 0:
                    clipped = a > 0 and ratio > 1 + algo.clip_high
                    used = min(ratio, 1 + algo.clip_high)
                    flat |= {"clipped", "clipped_high"} if clipped else set()
                else:
                    clipped = ratio < 1 - algo.clip_low or ratio > algo.dual_clip
                    used = min(max(ratio, 1 - algo.clip_low), algo.dual_clip)
                    flat |= {"clipped", "clipped_low"} if ratio < 1 - algo.clip_low else set()
                    flat |= {"clipped"} if clipped else set()
                sums["policy_loss"] += -a * weight * used
                loss += -a * weight * used + algo.kl_coef * (math.exp(d) - d - 1) - algo.entropy_coef * k["entropy"]
                slope += (0.0 if clipped else -a * weight * ratio) + algo.kl_coef * (1 - math.exp(d))
            slopes.append(slope)
            for name in flat:
                sums[name] += len(t["leaves"])
    return loss, slopes, sums


def check(turns: list[Turn], algo: AlgoConfig, first: bool) -> LossSum:
    known, now, entropy, reference = tensors(turns, algo, first)
    part = policy_loss(known, now, entropy, reference, algo)
    loss, slopes, sums = slow(turns, algo, first)
    assert part.total.item() == pytest.approx(loss, rel=1e-9, abs=1e-9)
    part.total.backward()
    assert now.grad is not None
    assert now.grad.tolist() == pytest.approx(slopes, rel=1e-8, abs=1e-9)
    for name in {"log_ratio", "importance", "importance_sq", "kl_behaviour", "clipped", "kl_reference"} | set(sums):
        if name in part.sums:
            assert part.sums[name] == pytest.approx(sums[name], rel=1e-8, abs=1e-8), name
    assert ("rejected" in part.sums) == (algo.reject != "none")
    assert ("weight" in part.sums) == ("capped" in part.sums) == (algo.weights != "none")
    return part


@given(st.lists(turn, min_size=1, max_size=5), algos, st.booleans())
def test_equals_the_transcription(turns: list[Turn], algo: AlgoConfig, first: bool) -> None:
    assume(not slow(turns, algo, first)[2]["kinks"])
    part = check(turns, algo, first)
    # What it is divided by counts the rejected tokens too.
    assert part.weight == sum(len(t["leaves"]) * sum(k["sampled"] for k in t["tokens"]) for t in turns)


@settings(max_examples=25)
@given(st.lists(turn, min_size=2, max_size=5), algos, st.data())
def test_any_split_between_turns_adds_up(turns: list[Turn], algo: AlgoConfig, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(turns)))
    whole, *parts = (policy_loss(*tensors(some, algo, first=False), algo) for some in (turns, turns[:cut], turns[cut:]))
    assert whole.weight == sum(part.weight for part in parts)
    torch.testing.assert_close(whole.total, parts[0].total + parts[1].total)
    for name, value in whole.sums.items():
        assert value == pytest.approx(sum(part.sums[name] for part in parts), rel=1e-9, abs=1e-9), name
    reports = [RankReport(), RankReport()]
    for report, part in zip(reports, parts, strict=True):
        report.add(part)
    figures = merge(reports)
    if whole.weight:
        n, w, w2 = whole.weight, whole.sums["importance"], whole.sums["importance_sq"]
        assert figures["ess"] == pytest.approx(w * w / (n * w2) if w2 else 0.0)
        assert 0 <= figures["ess"] <= 1 + 1e-9
        assert not {"importance", "importance_sq"} & set(figures)


def one(now: float, behaviour: float, start: float | None = None, sampled: bool = True) -> dict[str, Any]:
    entropy = {"entropy": 1.0, "reference": now}
    return {"now": now, "start": now if start is None else start, "behaviour": behaviour, "sampled": sampled} | entropy


def test_weights_by_hand() -> None:
    """Ratios 1.5 and 1.2: 1.8 together; a masked token of ratio 100 is no part of it."""
    tokens = [one(0.0, -math.log(1.5)), one(0.0, -math.log(100), sampled=False), one(0.0, -math.log(1.2))]
    turns = [{"tokens": tokens, "leaves": [1.0, -1.0, 2.0]}]
    for weights, cap, expected, capped in (
        ("token", 2.0, 1.5 + 1.2, 0),
        ("token", 1.4, 1.4 + 1.2, 1),
        ("sequence", 2.0, 1.8 + 1.8, 0),
        ("sequence", 1.7, 1.7 + 1.7, 2),
    ):
        algo = AlgoConfig(proximal="recomputed", weights=weights, weight_cap=cap, entropy_coef=0, kl_coef=0)
        part = check(turns, algo, first=False)
        assert part.total.item() == pytest.approx(-2 * expected)  # ratio 1 against the proximal policy
        assert part.sums["weight"] == pytest.approx(3 * expected)
        assert part.sums["capped"] == 3 * capped


def test_rejection_by_hand() -> None:
    """Token ratios 4, 1/4 and 1: two tokens lie outside, their turn's geometric mean of 1 does not."""
    tokens = [one(0.0, -math.log(4)), one(-math.log(4), 0.0), one(-1.0, -1.0)]
    masked = [one(0.0, -math.log(1.5)), one(0.0, -math.log(1.5)), one(0.0, -9.0, sampled=False)]
    for turn, by_token, by_turn in (
        (tokens, 2, 0),
        (tokens[:1], 1, 1),
        (tokens[::2], 1, 0),  # a mean of exactly 2, the bound, is inside
        (masked, 0, 0),  # a mean of 1.5, though the product is 2.25 and the masked token's ratio is e^9
        ([*masked, *tokens[:2], one(0.0, -math.log(40))], 3, 1),
    ):
        turns = [{"tokens": turn, "leaves": [1.0]}]
        for reject, expected in (("token", by_token), ("sequence", by_turn)):
            part = check(turns, AlgoConfig(reject=reject, reject_high=2.0 + 1e-12), first=True)
            assert part.sums["rejected"] == (expected if reject == "token" else by_turn * part.weight)
            assert part.weight == sum(t["sampled"] for t in turn)


def test_a_rejected_batch_is_worth_nothing() -> None:
    turns = [{"tokens": [one(0.0, -5.0)] * 2, "leaves": [1.0, -1.0]}]
    algo = AlgoConfig(proximal="recomputed", weights="token", reject="token", kl_coef=0.1, entropy_coef=0.1)
    part = check(turns, algo, first=True)
    report = RankReport()
    report.add(part)
    figures = merge([report])
    assert part.total.item() == 0
    assert [figures[name] for name in ("rejected", "weight", "capped", "ess")] == [1, 0, 0, 0]


def test_on_policy_weights_change_nothing() -> None:
    turns = [{"tokens": [one(-x, -x) for x in (0.5, 1.0, 2.5)], "leaves": [1.5, -0.5]}]
    corrected = AlgoConfig(proximal="recomputed", weights="sequence", reject="sequence")
    plain, other = (policy_loss(*tensors(turns, algo, False), algo) for algo in (AlgoConfig(), corrected))
    assert torch.equal(plain.total, other.total)
    report = RankReport()
    report.add(other)
    assert merge([report])["ess"] == 1


def test_the_plain_loss_is_the_formula_to_the_last_bit() -> None:
    """Without correction nothing may be added, not even a rounding."""
    algo = AlgoConfig(kl_coef=0.0, entropy_coef=0.0)
    rng = torch.Generator().manual_seed(5)
    behaviour, gain, cost, shift = (torch.randn(500, generator=rng) for _ in range(4))
    copies = torch.randint(0, 4, (500,), generator=rng).float()
    gain, cost = gain.abs(), cost.abs()
    got = (behaviour + shift).requires_grad_()
    part = policy_loss(
        Columns(behaviour, gain, -cost, copies, torch.arange(500) // 7 * 7), got, torch.zeros(500), None, algo
    )
    part.total.backward()
    plain = (behaviour + shift).requires_grad_()
    ratio = (plain - behaviour).exp()
    trained = copies > 0
    terms = cost * trained * ratio.clamp(min=0.8).clamp(max=3.0) - gain * trained * ratio.clamp(max=1.2)
    terms.sum().backward()
    assert torch.equal(part.total, terms.sum())
    assert torch.equal(got.grad, plain.grad)


def test_columns_tell_turns_apart_and_padding_weighs_nothing() -> None:
    def sample(size: int) -> TurnSample:
        return dataclasses.replace(
            PADDING, response_ids=(1,) * size, loss_mask=(True,) * size, logprobs=(-0.1,) * size, copies=1
        )

    known = columns([sample(2), sample(0), PADDING, sample(3)], proximal=torch.zeros(6))
    assert known.turn.tolist() == [0, 0, 2, 3, 3, 3]
    algo = AlgoConfig(proximal="recomputed", weights="sequence", weight_cap=9, reject="sequence", kl_coef=0)
    part = policy_loss(known, torch.zeros(6), torch.ones(6), None, algo)
    assert part.weight == 5
    assert part.sums["weight"] == pytest.approx(2 * math.exp(0.2) + 3 * math.exp(0.3))
    alone = policy_loss(columns([PADDING]), torch.full((1,), -9.0), torch.ones(1), None, algo)
    assert alone.total.item() == alone.weight == 0
    assert not any(alone.sums.values())


def test_extreme_turns_stay_finite() -> None:
    turns = [{"tokens": [one(0.0, -50.0)] * 40, "leaves": [1.0]}, {"tokens": [one(-50.0, 0.0)] * 40, "leaves": [-1.0]}]
    for level in ("token", "sequence"):
        algo = AlgoConfig(proximal="recomputed", weights=level, weight_cap=1e9, reject=level)
        for chosen in (algo, algo.model_copy(update={"reject": "none"})):
            known, now, entropy, reference = tensors(turns, chosen, first=False)
            part = policy_loss(known, now, entropy, reference, chosen)
            part.total.backward()
            assert torch.isfinite(now.grad).all()
            assert all(math.isfinite(value) for value in part.sums.values())


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("algo.weights=token", ["algo: weights=token needs proximal=recomputed", "algo.weights=none"]),
        ("algo.weights=sentence", ["algo.weights", "'token' or 'sequence'"]),
        ("algo.weight_cap=0.5", ["algo.weight_cap", "greater than or equal to 1"]),
        ("algo.reject_low=1", ["algo.reject_low", "less than 1"]),
        ("algo.reject_high=1", ["algo.reject_high", "greater than 1"]),
    ],
)
def test_settings_that_cannot_be_are_refused(override: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        validate({"env": {"name": "pantry"}}, [override])
    assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)
