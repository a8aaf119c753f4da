"""One rank of the learner group: a Ray actor around a DeepSpeed engine.

Invariants: every rank is given the same rows and computes the same plan, so all run the same number of micro-batches
and divide by the same weight without asking each other; losses are divided once by that global weight, which rejected
tokens stay in, and DeepSpeed's mean over the ranks is undone once; log-probs refer to the sampling temperature. Public
methods are called on all ranks together, except ``listen``; :class:`asyncrl.learner.group.LearnerGroup` says what those
do that have the same name there.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported from C
from transformers import set_seed

from asyncrl.algo.loss import LossSum, cross_entropy, policy_loss
from asyncrl.config.algo import AlgoConfig
from asyncrl.config.learner import LearnerConfig
from asyncrl.learner import attention, checkpoint, policy, zero
from asyncrl.learner.batch import PADDING, Packed, Rows, columns, digests, pack, weight, with_gradient
from asyncrl.learner.gather import weight_source
from asyncrl.learner.packing import plan, split_groups
from asyncrl.learner.report import RankReport
from asyncrl.model.load import load_causal_lm
from asyncrl.types import Probe, Row, TurnSample


@dataclass(eq=False)
class LearnerRank:
    rank: int
    model_path: str
    learner: LearnerConfig
    algo: AlgoConfig | None
    dtype: str
    temperature: float
    seed: int

    def __post_init__(self) -> None:
        self.updates = self.rows = 0
        self._store: TCPStore | None = None
        self._sender: Any = None

    def listen(self) -> tuple[str, int]:
        """Rank 0 only: open the address at which the ranks meet."""
        host = ray.util.get_node_ip_address()
        self._store = TCPStore(host, 0, self.learner.world_size, is_master=True, wait_for_workers=False)
        return host, self._store.port

    def start(self, host: str, port: int) -> None:
        """Meet the other ranks, load the model (and the reference, if the loss needs one) and build the engine."""
        if self.learner.threads:
            torch.set_num_threads(self.learner.threads)
        set_seed(self.seed % 2**32)
        world_size = self.learner.world_size
        store = self._store or TCPStore(host, port, world_size, is_master=False)
        self.device = torch.device("cuda", 0) if self.learner.gpus else torch.device("cpu")
        zero.join(store, self.rank, world_size, self.device, self.learner.update_timeout_s)
        load = partial(load_causal_lm, self.model_path, self.dtype, attention.register(), self.device)
        model = load()
        if self.learner.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.engine = zero.build(model, self.learner, self.dtype)
        self._reference = None
        if self.algo is not None and self.algo.kl_coef > 0:
            # Held whole on every rank: it is read in every micro-batch.
            self._reference = load().eval().requires_grad_(False)

    def update(self, batch: Sequence[ray.ObjectRef]) -> RankReport:
        """Split the batch into ``updates_per_batch`` optimizer steps of whole groups, and make them.

        A step without any trained token is left out and not counted.
        """
        algo = self.algo
        assert algo is not None, "this learner group was started for supervised training only"
        groups: list[list[TurnSample]] = ray.get(list(batch), timeout=self.learner.update_timeout_s)
        self.rows += sum(map(len, groups))
        report = RankReport()
        parts = split_groups(len(groups), self.learner.updates_per_batch)
        steps = [samples for part in parts if weight(samples := [s for i in part for s in groups[i]])]
        seen = [with_gradient(samples, algo) for samples in steps]
        # Log-probs before the first step changes the policy; that step itself needs none, its own are those.
        anchors = [
            [x for _, x in self._forward(chosen, self.temperature)] if number and algo.proximal == "recomputed" else []
            for number, (chosen, _) in enumerate(seen)
        ]
        for samples, (chosen, idle), known in zip(steps, seen, anchors, strict=True):
            if self.rank == 0:
                report.unseen += weight(idle)
                for sample in idle:
                    _compare([sample], pack([sample]), report)
            part = self._policy_part(chosen, algo, known, report)
            self._step(chosen, weight(samples), part, report)
        return report

    def sft_step(self, rows: Sequence[Row], lr: float) -> RankReport:
        """One optimizer step of cross-entropy on the response tokens."""
        report = RankReport()

        def part(packed: Packed, members: list[int]) -> LossSum:
            logprobs, _ = policy.logprobs(self.engine, packed, temperature=1.0)
            return cross_entropy(logprobs, torch.full_like(logprobs, float(bool(members))))

        total = sum(len(row.response_ids) for row in rows)
        if total:
            self._step(rows, total, part, report, lr)
        return report

    def logprobs(self, probes: Sequence[Probe], temperature: float) -> dict[int, list[float]]:
        """Those of this rank's share, by index into ``probes``; the ranks' results together cover all of them."""
        rows = [Row(ids[:start], ids[start:]) for ids, start in probes]
        result: dict[int, list[float]] = {}
        for members, values in self._forward(rows, temperature):
            sizes = [len(rows[i].response_ids) for i in members]
            if members:
                result |= {i: part.tolist() for i, part in zip(members, values.cpu().split(sizes), strict=True)}
        return result

    def connect(self, generators: Sequence[Any], timeout_s: float) -> None:
        # Imported here: vLLM takes seconds to import and supervised training does without.
        from asyncrl.engine.transfer import Sender, backend_for

        source = weight_source(self.engine.module)
        self._sender = Sender(backend_for(self.learner.gpus), generators, source, self.rank, timeout_s)

    def send_weights(self, members: Sequence[int]) -> dict[int, str]:
        return self._sender.send(members)

    def save(self, path: str) -> None:
        checkpoint.save(self.engine, self.model_path, path, {"updates": self.updates, "rows": self.rows})

    def load_state(self, path: str) -> int:
        """The reference stays the model the group was started with."""
        counts = checkpoint.load(self.engine, path)
        self.updates, self.rows = counts["updates"], counts["rows"]
        return self.updates

    def _share(self, rows: Rows) -> list[list[int]]:
        lengths = [len(row.prompt_ids) + len(row.response_ids) for row in rows]
        return plan(lengths, self.learner.tokens_per_micro_batch, self.learner.world_size)[self.rank]

    @torch.no_grad()
    def _forward(self, rows: Rows, temperature: float) -> Iterator[tuple[list[int], Tensor]]:
        """Members and log-probs of each micro-batch of this rank's share, planned as a step on ``rows`` would be."""
        self.engine.eval()
        for members in self._share(rows):
            packed = pack([rows[i] for i in members] or [PADDING], self.device)
            yield members, policy.logprobs(self.engine, packed, temperature)[0]

    def _policy_part(
        self, samples: Sequence[TurnSample], algo: AlgoConfig, proximal: Sequence[Tensor], report: RankReport
    ) -> Callable[[Packed, list[int]], LossSum]:
        anchors = iter(proximal)  # in the order of the micro-batches

        def part(packed: Packed, members: list[int]) -> LossSum:
            chosen = [samples[i] for i in members] or [PADDING]
            _compare(chosen, packed, report)
            logprobs, entropy = policy.logprobs(self.engine, packed, self.temperature, algo.entropy_coef > 0)
            reference = None
            if self._reference is not None:  # no weight of it asks for a gradient
                reference, _ = policy.logprobs(self._reference, packed, self.temperature)
            known = columns(chosen, self.device, next(anchors, None))
            return policy_loss(known, logprobs, entropy, reference, algo)

        return part

    def _step(
        self,
        rows: Rows,
        total: float,
        part_of: Callable[[Packed, list[int]], LossSum],
        report: RankReport,
        lr: float | None = None,
    ) -> None:
        """One optimizer step: accumulate this rank's micro-batches, each loss divided by ``total``, then apply."""
        share = self._share(rows)
        self.engine.train()
        for i, members in enumerate(share):
            chosen = [rows[r] for r in members]
            packed = pack(chosen or [PADDING], self.device)
            part = part_of(packed, members)
            self.engine.set_gradient_accumulation_boundary(i == len(share) - 1)
            # DeepSpeed takes the mean over the ranks; the loss is a sum over them.
            self.engine.backward(part.total * (self.learner.world_size / total), scale_wrt_gas=False)
            report.add(part)
            report.rows += len(chosen)
            report.tokens += sum(len(row.prompt_ids) + len(row.response_ids) for row in chosen)
            report.micro_batches += 1
        warmup = min(1.0, (self.updates + 1) / max(1, self.learner.warmup_updates))
        report.lr = (self.learner.lr if lr is None else lr) * warmup
        report.grad_norm += self._apply(report.lr)
        self.updates += 1
        report.updates += 1

    def _apply(self, lr: float) -> float:
        return zero.step(self.engine, lr)


def _compare(samples: Sequence[TurnSample], packed: Packed, report: RankReport) -> None:
    """Count the rows whose packed response is not what their generator says it sampled."""
    pairs = [(s.digest, found) for s, found in zip(samples, digests(packed), strict=True) if s.digest]
    report.digests_checked += len(pairs)
    report.digest_mismatches += sum(said != found for said, found in pairs)
