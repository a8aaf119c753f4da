"""One rank of the learner group: a Ray actor around a DeepSpeed engine.

Invariants: every rank is given the same rows and computes the same plan, so all run the same number of micro-batches
and divide by the same weight without asking each other; losses are divided once by that global weight, which rejected
tokens stay in, and DeepSpeed's mean over the ranks is undone once; log-probs refer to the sampling temperature. Public
methods are called on all ranks together, except ``listen``.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ray
import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported from C
from transformers import set_seed

from asyncrl.algo.loss import LossSum, cross_entropy, policy_loss
from asyncrl.config.algo import AlgoConfig
from asyncrl.config.learner import LearnerConfig
from asyncrl.learner import checkpoint, policy, zero
from asyncrl.learner.batch import PADDING, Packed, Row, columns, digests, pack, row_of, weight, with_gradient
from asyncrl.learner.gather import weight_source
from asyncrl.learner.packing import plan, split_groups
from asyncrl.learner.report import RankReport
from asyncrl.types import TurnSample


class LearnerRank:
    def __init__(
        self,
        rank: int,
        model_path: str,
        learner: LearnerConfig,
        algo: AlgoConfig | None,
        dtype: str,
        temperature: float,
        seed: int,
    ) -> None:
        self.rank = rank
        self.updates = self.rows = 0
        self._model_path = model_path
        self._learner = learner
        self._algo = algo
        self._dtype = dtype
        self._temperature = temperature
        self._seed = seed
        self._store: TCPStore | None = None
        self._sender: Any = None

    def listen(self) -> tuple[str, int]:
        """Rank 0 only: open the address at which the ranks meet."""
        host = ray.util.get_node_ip_address()
        self._store = TCPStore(host, 0, self._learner.world_size, is_master=True, wait_for_workers=False)
        return host, self._store.port

    def start(self, host: str, port: int) -> None:
        """Meet the other ranks, load the model (and the reference, if the loss needs one) and build the engine."""
        if self._learner.threads:
            torch.set_num_threads(self._learner.threads)
        set_seed(self._seed % 2**32)
        world_size = self._learner.world_size
        store = self._store or TCPStore(host, port, world_size, is_master=False)
        self.device = torch.device("cuda", 0) if self._learner.gpus else torch.device("cpu")
        zero.join(store, self.rank, world_size, self.device, self._learner.update_timeout_s)
        model = policy.load(self._model_path, self._dtype, self.device)
        if self._learner.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.engine = zero.build(model, self._learner, self._dtype)
        self._reference = None
        if self._algo is not None and self._algo.kl_coef > 0:
            # Held whole on every rank: it is read in every micro-batch.
            self._reference = policy.load(self._model_path, self._dtype, self.device).eval().requires_grad_(False)

    def update(self, batch: Sequence[ray.ObjectRef]) -> RankReport:
        """Train on a batch; each reference holds one group's ``list[TurnSample]``.

        The batch is split into ``updates_per_batch`` optimizer steps of whole groups. A step without any trained token
        is left out and not counted.
        """
        algo = self._algo
        assert algo is not None, "this learner group was started for supervised training only"
        groups: list[list[TurnSample]] = ray.get(list(batch), timeout=self._learner.update_timeout_s)
        self.rows += sum(map(len, groups))
        report = RankReport()
        parts = split_groups(len(groups), self._learner.updates_per_batch)
        steps = [samples for part in parts if weight(samples := [s for i in part for s in groups[i]])]
        seen = [with_gradient(samples, algo) for samples in steps]
        # Log-probs before the first step changes the policy; that step itself needs none, its own are those.
        later = seen[1:] if algo.proximal == "recomputed" else []
        anchors = [[x for _, x in self._forward([row_of(s) for s in step], self._temperature)] for step, _ in later]
        for samples, (chosen, idle), known in zip(steps, seen, [[]] * (len(steps) - len(later)) + anchors, strict=True):
            if idle and self.rank == 0:
                _compare(idle, pack([row_of(s) for s in idle]), report)
            part = self._policy_part(chosen, algo, known, report)
            self._step([row_of(s) for s in chosen], weight(samples), part, report)
        return report

    def sft_step(self, rows: Sequence[tuple[Sequence[int], Sequence[int]]], lr: float) -> RankReport:
        """One optimizer step of cross-entropy on the response tokens of (prompt ids, response ids) rows."""
        report = RankReport()
        data = [Row(*row) for row in rows]

        def part(packed: Packed, members: list[int]) -> LossSum:
            logprobs, _ = policy.logprobs(self.engine, packed, temperature=1.0)
            return cross_entropy(logprobs, torch.full_like(logprobs, float(bool(members))))

        total = sum(len(row.response_ids) for row in data)
        if total:
            self._step(data, total, part, report, lr)
        return report

    def logprobs(
        self, sequences: Sequence[tuple[Sequence[int], int]], temperature: float = 1.0
    ) -> dict[int, list[float]]:
        """Log-probs of ``ids[start:]`` given what precedes each, for this rank's share of the (ids, start) pairs.

        Returns lists by index into ``sequences``; the ranks' results together cover all of them.
        """
        rows = [Row(ids[:start], ids[start:]) for ids, start in sequences]
        result: dict[int, list[float]] = {}
        for members, values in self._forward(rows, temperature):
            sizes = [len(rows[i].response_ids) for i in members]
            if members:
                result |= {i: part.tolist() for i, part in zip(members, values.cpu().split(sizes), strict=True)}
        return result

    def connect(self, generators: Sequence[Any], timeout_s: float) -> None:
        """Set up weight transfer to the generators' actor handles; a learner with part of a GPU shares it with them.

        ``timeout_s``: longest a single call to the generators may take in a publish.
        """
        # Imported here: vLLM takes seconds to import and supervised training does without.
        from asyncrl.engine.transfer import Sender, backend_for

        source = weight_source(self.engine.module)
        self._sender = Sender(backend_for(self._learner.gpus), generators, source, self.rank, timeout_s)

    def send_weights(self, members: Sequence[int]) -> dict[int, str]:
        """Hand the current weights to the generators of these indices; returns who failed and why."""
        return self._sender.send(members)

    def save(self, path: str) -> None:
        checkpoint.save(self.engine, self._model_path, path, {"updates": self.updates, "rows": self.rows})

    def load_state(self, path: str) -> int:
        """Take weights, optimizer state and update count from a checkpoint; returns the count.

        The reference stays the model the group was started with.
        """
        counts = checkpoint.load(self.engine, path)
        self.updates, self.rows = counts["updates"], counts["rows"]
        return self.updates

    def _share(self, rows: Sequence[Row]) -> list[list[int]]:
        lengths = [len(row.prompt_ids) + len(row.response_ids) for row in rows]
        return plan(lengths, self._learner.tokens_per_micro_batch, self._learner.world_size)[self.rank]

    @torch.no_grad()
    def _forward(self, rows: Sequence[Row], temperature: float) -> Iterator[tuple[list[int], Tensor]]:
        """Members and log-probs of each micro-batch of this rank's share, planned as a step on ``rows`` would be."""
        self.engine.eval()
        for members in self._share(rows):
            packed = pack([rows[i] for i in members] or [row_of(PADDING)], self.device)
            yield members, policy.logprobs(self.engine, packed, temperature)[0]

    def _policy_part(
        self, samples: Sequence[TurnSample], algo: AlgoConfig, proximal: Sequence[Tensor], report: RankReport
    ) -> Callable[[Packed, list[int]], LossSum]:
        anchors = iter(proximal)  # in the order of the micro-batches

        def part(packed: Packed, members: list[int]) -> LossSum:
            chosen = [samples[i] for i in members] or [PADDING]
            _compare(chosen, packed, report)
            logprobs, entropy = policy.logprobs(self.engine, packed, self._temperature, algo.entropy_coef > 0)
            reference = None
            if self._reference is not None:  # no weight of it asks for a gradient
                reference, _ = policy.logprobs(self._reference, packed, self._temperature)
            known = columns(chosen, self.device, next(anchors, None))
            return policy_loss(known, logprobs, entropy, reference, algo)

        return part

    def _step(
        self,
        rows: Sequence[Row],
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
            packed = pack(chosen or [row_of(PADDING)], self.device)
            part = part_of(packed, members)
            self.engine.set_gradient_accumulation_boundary(i == len(share) - 1)
            # DeepSpeed takes the mean over the ranks; the loss is a sum over them.
            self.engine.backward(part.total * (self._learner.world_size / total), scale_wrt_gas=False)
            report.add(part)
            report.rows += len(chosen)
            report.tokens += sum(len(row.prompt_ids) + len(row.response_ids) for row in chosen)
            report.micro_batches += 1
        warmup = min(1.0, (self.updates + 1) / max(1, self._learner.warmup_updates))
        report.lr = (self._learner.lr if lr is None else lr) * warmup
        zero.set_lr(self.engine, report.lr)
        report.grad_norm += self._apply()
        self.updates += 1
        report.updates += 1

    def _apply(self) -> float:
        return zero.step(self.engine)


def _compare(samples: Sequence[TurnSample], packed: Packed, report: RankReport) -> None:
    """Count the rows whose packed response is not what their generator says it sampled."""
    pairs = [(s.digest, found) for s, found in zip(samples, digests(packed), strict=True) if s.digest]
    report.digests_checked += len(pairs)
    report.digest_mismatches += sum(said != found for said, found in pairs)
