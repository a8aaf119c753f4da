"""The learner group on real DeepSpeed over gloo: one gradient however the work is split, nothing lost on disk."""

import asyncio
import dataclasses
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import ray
import torch
from safetensors.torch import load
from transformers import AutoModelForCausalLM

from asyncrl.coldstart.sft import train_sft
from asyncrl.config.algo import AlgoConfig
from asyncrl.config.coldstart import SftConfig
from asyncrl.config.learner import LearnerConfig
from asyncrl.learner.group import LearnerError, LearnerGroup
from asyncrl.learner.rank import LearnerRank
from asyncrl.types import Row, TurnSample, VersionSpan, token_digest
from tests.tiny_qwen import tiny_qwen

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]
VOCAB = 64
TEMPERATURE = 0.8
ALGO = AlgoConfig(kl_coef=0.05, entropy_coef=0.01)
LEARNER = LearnerConfig(threads=1, lr=1e-3, tokens_per_micro_batch=64, start_timeout_s=200, update_timeout_s=100)


class ProbeRank(LearnerRank):
    """A rank that keeps the gradient each optimizer step is given, as DeepSpeed holds it, and can begin anew or die."""

    def renew(self, learner: LearnerConfig, algo: AlgoConfig | None) -> None:
        """Be the same rank of another group, in this process and with the ranks met before."""
        self.__init__(self.rank, self.model_path, learner, algo, self.dtype, self.temperature, self.seed)
        self._store = mock.Mock()
        with mock.patch("asyncrl.learner.zero.join"):
            self.start("met", 0)

    def _apply(self, lr: float) -> float:
        from deepspeed.utils import safe_get_full_grad

        self.gradient = {n: safe_get_full_grad(p).clone().numpy() for n, p in self.engine.module.named_parameters()}
        return super()._apply(lr)

    def last_gradient(self) -> dict[str, np.ndarray]:
        return self.gradient

    def weights(self) -> dict[str, np.ndarray]:
        from asyncrl.learner.gather import weight_source

        source = weight_source(self.engine.module)
        pairs = list(source)
        declared = [(meta.name, meta.shape, meta.dtype) for meta in source.metadata()]
        assert declared == [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in pairs]
        return {name: tensor.clone().numpy() for name, tensor in pairs}

    def die(self) -> None:
        os._exit(1)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    tiny_qwen(vocab_size=VOCAB, tie_word_embeddings=True).save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    return str(path)


@pytest.fixture(scope="module", autouse=True)
def cluster(ray_cluster: None) -> None:
    # The probe lives in this file, which the actors cannot import.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


Start = Callable[..., LearnerGroup]


@pytest.fixture(scope="module")
def started(model_path: str) -> Iterator[Start]:
    """Starts groups, of which the last of each size lives: processes take far longer to start than their engines."""
    living: dict[int, LearnerGroup] = {}

    def start(algo: AlgoConfig | None = ALGO, **changes: object) -> LearnerGroup:
        learner = LEARNER.model_copy(update=changes)
        before = living.get(learner.world_size)
        if before is not None and before._ended is None:
            group = LearnerGroup(before._ranks, learner)
            asyncio.run(group._call("renew", learner, algo))
        else:
            with mock.patch("asyncrl.learner.group.LearnerRank", ProbeRank):
                group = LearnerGroup.create(model_path, learner, algo, temperature=TEMPERATURE)
            asyncio.run(group.start())
        living[learner.world_size] = group
        return group

    yield start
    for group in living.values():
        asyncio.run(group.shutdown())


def ask(group: LearnerGroup, method: str) -> list:
    """Call a probe's method on all ranks."""
    return asyncio.run(group._call(method))


def samples(groups: int, seed: int = 0) -> list[list[TurnSample]]:
    rng = np.random.default_rng(seed)
    made = []
    for group in range(groups):
        rows = []
        for node in range(6):
            prompt, response = (
                tuple(int(i) for i in rng.integers(1, VOCAB, size=rng.integers(1, high))) for high in (30, 9)
            )
            size = len(response)
            rows.append(
                TurnSample(
                    prompt,
                    response,
                    tuple(bool(b) for b in rng.random(size) < 0.9),
                    tuple(float(x) for x in rng.normal(-4, 0.3, size)),
                    advantage_pos=float(rng.random()),
                    advantage_neg=-float(rng.random()),
                    copies=int(rng.integers(1, 4)),
                    spans=(VersionSpan(0, 0, size),),
                    group=group,
                    node=node,
                    digest=token_digest(response),
                )
            )
        made.append(rows)
    return made


def train(group: LearnerGroup, batch: list[list[TurnSample]]) -> dict[str, float]:
    return asyncio.run(group.update([ray.put(rows) for rows in batch]))


Outcome = tuple[dict[str, float], dict[str, np.ndarray], dict[str, np.ndarray]]
"""Figures, gradient and new weights of one update."""


def outcome(group: LearnerGroup) -> Outcome:
    """Of a fresh group's first update, which is the same in all tests."""
    figures = train(group, samples(3))
    return figures, ask(group, "last_gradient")[0], ask(group, "weights")[0]


@pytest.fixture(scope="module")
def expected(started: Start) -> Outcome:
    return outcome(started(zero_stage=0))


def assert_same(got: Outcome, expected: Outcome) -> None:
    figures, gradient, weights = got
    assert gradient.keys() == expected[1].keys()
    for name, value in expected[1].items():
        np.testing.assert_allclose(gradient[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    for name, value in expected[2].items():
        # Adam's first step is the gradient's sign wherever the gradient is not tiny: weaker, so checked beside it.
        assert np.abs(weights[name] - value).max() <= 2.1e-3, name
        assert np.mean(np.abs(weights[name] - value) > 1e-5) < 0.01, name
    for name in ("loss", "entropy", "kl_reference", "clipped", "grad_norm", "rows", "tokens", "trained_tokens"):
        assert figures[name] == pytest.approx(expected[0][name], rel=1e-4, abs=1e-6), name


def test_gradient_equals_a_plain_loop_over_rows(model_path: str, expected: Outcome) -> None:
    """An oracle without packing, DeepSpeed or sums: every row alone, every copy's loss as its own token-mean share."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    with torch.no_grad():
        reference = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    rows = [sample for group in samples(3) for sample in group]
    weight = sum(sample.copies * sum(sample.loss_mask) for sample in rows)
    for sample in rows:
        ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
        where = slice(len(sample.prompt_ids) - 1, -1)
        table = (model(input_ids=ids).logits[0, where] / TEMPERATURE).log_softmax(-1)
        with torch.no_grad():
            frozen = (reference(input_ids=ids).logits[0, where] / TEMPERATURE).log_softmax(-1)
        targets = torch.tensor(sample.response_ids)[:, None]
        logprob, ref = table.gather(1, targets)[:, 0], frozen.gather(1, targets)[:, 0]
        entropy = -(table.exp() * table).sum(-1)
        ratio = (logprob - torch.tensor(sample.logprobs)).exp()
        loss = -sample.advantage_pos * torch.minimum(ratio, torch.tensor(1.2))
        loss = loss - sample.advantage_neg * ratio.clamp(min=0.8).clamp(max=3.0)
        divergence = (ref - logprob).exp() - (ref - logprob) - 1
        loss = loss + sample.copies * (ALGO.kl_coef * divergence - ALGO.entropy_coef * entropy)
        ((loss * torch.tensor(sample.loss_mask)).sum() / weight).backward()
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(expected[1][name], parameter.grad.numpy(), rtol=1e-4, atol=1e-6, err_msg=name)
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert expected[0]["grad_norm"] == pytest.approx(float(norm), rel=1e-4)


@pytest.mark.parametrize("changes", [
    {"zero_stage": 1, "tokens_per_micro_batch": 4096},
    {"zero_stage": 0, "world_size": 2},
    {"zero_stage": 1, "world_size": 2, "gradient_checkpointing": True},
    {"zero_stage": 2, "world_size": 2, "tokens_per_micro_batch": 150},
    {"zero_stage": 3, "world_size": 2},
])  # fmt: skip
def test_split_and_stage_change_nothing(started: Start, expected: Outcome, changes: dict[str, object]) -> None:
    assert_same(outcome(started(**changes)), expected)


@pytest.mark.parametrize("idle", [{0, 3, 4}, set(range(6))])
def test_turns_without_advantage_are_not_seen_by_the_model_and_change_nothing(started: Start, idle: set[int]) -> None:
    """The oracle sees them all: it has an entropy bonus, too small to add anything."""
    nothing = {"advantage_pos": 0.0, "advantage_neg": 0.0}
    batch = [
        [dataclasses.replace(row, **nothing) if row.node in idle else row for row in group]
        for group in samples(4, seed=6)
    ]
    for group in batch:
        group[0] = dataclasses.replace(group[0], **nothing, copies=0)  # a row that no leaf trains
    outcomes = []
    for bonus in (0.0, 1e-30):
        algo = AlgoConfig(kl_coef=0, entropy_coef=bonus, proximal="recomputed")
        group = started(algo, world_size=2, updates_per_batch=2, lr=1e-6)  # the second step's gradient is compared
        outcomes.append((train(group, batch), ask(group, "last_gradient")[0]))
    (few, gradient), (all_, expected) = outcomes
    for name, value in expected.items():
        np.testing.assert_allclose(gradient[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    for name in ("grad_norm", "loss", "policy_loss"):
        assert few[name] == pytest.approx(all_[name], rel=1e-5, abs=1e-9)
    seen = max(2, 24 - 4 * len(idle))  # each of the two steps sees one row at least
    assert (few["rows"], all_["rows"], few["updates"]) == (seen, 24, 2)
    assert few["digests_checked"] == all_["digests_checked"] == 24


TOKEN = AlgoConfig(
    kl_coef=0.05,
    entropy_coef=0.01,
    proximal="recomputed",
    weights="token",
    weight_cap=1.2,
    reject="sequence",
    reject_low=0.75,
    reject_high=1.1,
)
SEQUENCE = TOKEN.model_copy(
    update={"weights": "sequence", "weight_cap": 1.05, "reject": "token", "reject_low": 0.6, "reject_high": 1.4}
)


def corrected_steps(model_path: str, algo: AlgoConfig) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """An oracle of two corrected updates: rows one by one, PyTorch's own AdamW, ratios as products of probabilities.

    Returns:
        The second update's gradient, and figures of both: shares and means over tokens and copies.
    """
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNER.lr, weight_decay=LEARNER.weight_decay)

    def forward(sample: TurnSample, network: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
        logits = network(input_ids=ids).logits[0, len(sample.prompt_ids) - 1 : -1]
        table = (logits / TEMPERATURE).log_softmax(-1)
        return table.gather(1, torch.tensor(sample.response_ids)[:, None])[:, 0], -(table.exp() * table).sum(-1)

    groups = samples(3)
    with torch.no_grad():
        start = {(s.group, s.node): forward(s, model)[0] for group in groups for s in group}
    sums: dict[str, float] = dict.fromkeys(("log_ratio", "weight", "capped", "rejected", "tokens"), 0.0)
    for step in (groups[:1], groups[1:]):
        rows = [sample for group in step for sample in group]
        divisor = sum(sample.copies * sum(sample.loss_mask) for sample in rows)
        optimizer.zero_grad()
        for sample in rows:
            logprob, entropy = forward(sample, model)
            old = start[sample.group, sample.node]
            ratios = [math.exp(p - b) for p, b in zip(old.tolist(), sample.logprobs, strict=True)]
            ours = [ratio for ratio, mask in zip(ratios, sample.loss_mask, strict=True) if mask]
            for t, mask in enumerate(sample.loss_mask):
                if not mask:
                    continue
                level = math.prod(ours) ** (1 / len(ours)) if algo.reject == "sequence" else ratios[t]
                raw = math.prod(ours) if algo.weights == "sequence" else ratios[t]
                keep = algo.reject_low <= level <= algo.reject_high
                weight = min(raw, algo.weight_cap) * keep
                for name, value in {
                    "log_ratio": math.log(ratios[t]),
                    "weight": weight,
                    "capped": keep and raw > algo.weight_cap,
                    "rejected": not keep,
                    "tokens": 1,
                }.items():
                    sums[name] += sample.copies * value
                if keep:
                    ratio = (logprob[t] - old[t]).exp()
                    loss = -weight * sample.advantage_pos * ratio.clamp(max=1.2)
                    loss = loss - weight * sample.advantage_neg * ratio.clamp(min=0.8).clamp(max=3.0)
                    # The reference is the model at the start.
                    divergence = (old[t] - logprob[t]).exp() - (old[t] - logprob[t]) - 1
                    loss = loss + sample.copies * (algo.kl_coef * divergence - algo.entropy_coef * entropy[t])
                    (loss / divisor).backward(retain_graph=True)
        gradient = {name: p.grad.clone().numpy() for name, p in model.named_parameters()}
        torch.nn.utils.clip_grad_norm_(model.parameters(), LEARNER.grad_clip)
        optimizer.step()
    return gradient, {name: sums[name] / sums["tokens"] for name in ("log_ratio", "weight", "capped", "rejected")}


@pytest.fixture(scope="module")
def corrected(model_path: str) -> dict[str, tuple[dict[str, np.ndarray], dict[str, float]]]:
    return {algo.weights: corrected_steps(model_path, algo) for algo in (TOKEN, SEQUENCE)}


@pytest.mark.parametrize(("algo", "changes"), [
    (TOKEN, {"zero_stage": 1}),
    (TOKEN, {"zero_stage": 3, "world_size": 2, "tokens_per_micro_batch": 150}),
    (SEQUENCE, {"zero_stage": 0, "tokens_per_micro_batch": 4096}),
    (SEQUENCE, {"zero_stage": 2, "world_size": 2}),
])  # fmt: skip
def test_correction_is_the_same_however_split(
    started: Start,
    corrected: dict[str, tuple[dict[str, np.ndarray], dict[str, float]]],
    algo: AlgoConfig,
    changes: dict[str, object],
) -> None:
    """The second of two updates, where the policy in training has left the proximal one."""
    gradient, expected = corrected[algo.weights]
    group = started(algo, updates_per_batch=2, **changes)
    figures = train(group, samples(3))
    got = ask(group, "last_gradient")[0]
    assert figures["updates"] == 2
    assert abs(figures["ratio"] - 1) > 1e-5  # the second update's ratio is not taken against its own policy
    for name, value in expected.items():
        assert figures[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert 0.05 < figures["rejected"] < 0.95
    assert figures["capped"] > 0
    assert 0 < figures["ess"] < 1
    # Adam's first step amplifies rounding where a gradient is tiny, so compared against the size of the whole.
    far = sum(float(((got[name] - value) ** 2).sum()) for name, value in gradient.items()) ** 0.5
    size = sum(float((value**2).sum()) for value in gradient.values()) ** 0.5
    assert far < 1e-3 * size


@pytest.fixture
def pair(started: Start) -> LearnerGroup:
    """Two ranks under ZeRO-3, the most distributed case."""
    return started(zero_stage=3, world_size=2)


def test_a_rank_without_rows_takes_part(pair: LearnerGroup) -> None:
    figures = train(pair, [samples(1)[0][:1]])
    assert figures["rows"] == 1
    assert figures["micro_batches"] == 2
    first, second = ask(pair, "last_gradient")
    for name, value in first.items():
        np.testing.assert_array_equal(value, second[name])
    assert figures["grad_norm"] > 0


def test_rows_of_no_weight_change_nothing(pair: LearnerGroup) -> None:
    batch = samples(1, seed=3)
    ballast = [dataclasses.replace(sample, copies=0, node=sample.node + 50) for sample in samples(1, seed=4)[0]]
    before = ask(pair, "weights")[0]
    nothing = train(pair, [ballast])
    assert nothing["updates"] == 0
    for name, value in ask(pair, "weights")[0].items():
        np.testing.assert_array_equal(value, before[name])
    figures = train(pair, [batch[0] + ballast])
    assert figures["trained_tokens"] == sum(s.copies * sum(s.loss_mask) for s in batch[0])
    assert figures["rows"] == 12


def test_digests_are_checked_against_the_packed_rows(pair: LearnerGroup) -> None:
    batch = samples(2, seed=5)
    assert [train(pair, batch)[name] for name in ("digests_checked", "digest_mismatches")] == [12, 0]
    tampered = dataclasses.replace(batch[0][0], response_ids=(*batch[0][0].response_ids[::-1], 3))
    size = len(tampered.response_ids)
    tampered = dataclasses.replace(tampered, loss_mask=(True,) * size, logprobs=(-4.0,) * size)
    assert train(pair, [[tampered]])["digest_mismatches"] == 1


class Receiver:
    """The calls a generator answers during a publish, keeping what arrives."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.received: dict[str, np.ndarray] = {}

    def init_weight_transfer_engine(self, request: object) -> None:
        self.calls.append("init")

    def start_weight_update(self, round: int) -> None:
        self.calls.append("start")

    def update_weights(self, round: int, request: dict[str, list[ray.ObjectRef]]) -> None:
        (bucket,) = ray.get(request["bucket"])
        self.received |= {name: tensor.numpy() for name, tensor in load(bytes(bucket)).items()}

    def finish_weight_update(self, round: int) -> None:
        self.calls.append("finish")

    def seen(self) -> tuple[list[str], dict[str, np.ndarray]]:
        return self.calls, self.received


def test_sharded_weights_arrive_whole_at_every_generator(pair: LearnerGroup) -> None:
    receivers = [ray.remote(Receiver).remote() for _ in range(2)]
    asyncio.run(pair.connect(receivers, 60))
    assert asyncio.run(pair.send_weights([0, 1])) == {}
    expected = ask(pair, "weights")[1]
    for calls, received in ray.get([receiver.seen.remote() for receiver in receivers]):
        assert calls == ["init", "start", "finish"]
        assert received.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_array_equal(received[name], value)


def test_one_rank_steps_over_whole_groups_and_refuses_the_state_of_two(
    pair: LearnerGroup, started: Start, tmp_path: Path
) -> None:
    asyncio.run(pair.save(str(tmp_path / "two")))
    single = started(zero_stage=3, updates_per_batch=2, warmup_updates=4)
    figures = train(single, samples(3))
    assert figures["updates"] == 2
    assert figures["rows"] == 18
    assert figures["lr"] == pytest.approx(LEARNER.lr * 2 / 4)
    with pytest.raises(LearnerError, match="world_size=2, this run has 1"):
        asyncio.run(single.load_state(str(tmp_path / "two")))


def test_checkpoint_round_trip(pair: LearnerGroup, model_path: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    sequences = [(tuple(int(i) for i in rng.integers(1, VOCAB, size=n)), 3) for n in (12, 5, 30, 4)]
    path = tmp_path / "version-000001"
    train(pair, samples(1))
    asyncio.run(pair.save(str(path)))
    assert (path / "tokenizer.json").is_file()
    saved = asyncio.run(pair.logprobs(sequences, 0.7))

    # Transformers loads the folder and agrees on every log-prob.
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for (ids, start), values in zip(sequences, saved, strict=True):
        with torch.no_grad():
            table = (model(input_ids=torch.tensor([ids])).logits[0] / 0.7).log_softmax(-1)
        expected = [table[i - 1, ids[i]].item() for i in range(start, len(ids))]
        np.testing.assert_allclose(values, expected, rtol=0, atol=1e-5)

    # Training from the restored state repeats what training from here does.
    train(pair, samples(2, seed=8))
    there = ask(pair, "weights")[0]
    train(pair, samples(2, seed=9))
    updates = asyncio.run(pair.load_state(str(path)))
    assert updates == json.loads((path / "state" / "learner.json").read_text())["updates"] > 0
    assert asyncio.run(pair.logprobs(sequences, 0.7)) == saved
    train(pair, samples(2, seed=8))
    for name, value in ask(pair, "weights")[0].items():
        np.testing.assert_allclose(value, there[name], rtol=0, atol=1e-7, err_msg=name)


def test_cold_start_lowers_the_loss(started: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    group = started(algo=None, world_size=2)
    rng = np.random.default_rng(2)
    rows = [Row(tuple(int(i) for i in rng.integers(1, VOCAB, size=6)), (5, 9, 2)) for _ in range(20)]
    seen: list[dict[str, float]] = []
    monkeypatch.setattr("asyncrl.coldstart.sft.REPORT_EVERY", 1)
    tracker = mock.Mock(log=lambda _, figures: seen.append(figures))
    steps = asyncio.run(train_sft(group, rows, SftConfig(epochs=16, batch_rows=8, lr=1e-2), tracker))
    assert steps == len(seen) == 16 * 3
    assert seen[-1]["sft/epoch"] == 16
    assert seen[0]["sft/loss"] == pytest.approx(np.log(VOCAB), rel=0.1)
    assert seen[-1]["sft/loss"] < 0.5 * seen[0]["sft/loss"]
    with pytest.raises(AssertionError, match="supervised training only"):
        ray.get(group._ranks[0].update.remote([]))  # of one rank alone, so that the group goes on


def test_a_dead_rank_ends_the_group_with_its_name(pair: LearnerGroup) -> None:
    pair._ranks[1].die.remote()
    with pytest.raises(LearnerError, match="rank 1"):
        train(pair, samples(3))
    with pytest.raises(LearnerError, match="has ended"):
        train(pair, samples(1))
