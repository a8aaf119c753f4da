"""The learner group as the rest of the system sees it: all ranks behind one set of awaitable calls.

Invariants: a call goes to all ranks or to none; it ends within its time limit; when one rank fails, dies or is late the
whole group is ended, since the others would wait for it in a collective, and the error names the rank. An ended group
answers every call with :class:`LearnerError`.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Self

import ray
from ray.exceptions import RayActorError

from asyncrl.config.algo import AlgoConfig
from asyncrl.config.learner import LearnerConfig
from asyncrl.learner.rank import LearnerRank
from asyncrl.learner.report import merge
from asyncrl.types import Probe, Row

GRACE_S = 5.0
"""How long the other ranks may take to report once one has failed: the first to fail may only have lost its peer."""


class LearnerError(RuntimeError):
    """A learner rank failed; the group has been ended."""


class LearnerGroup:
    """Made by :meth:`create`, ready after :meth:`start`. Calls are made one after another, never two at a time."""

    def __init__(self, ranks: Sequence[Any], config: LearnerConfig) -> None:
        self._ranks = list(ranks)
        self._config = config
        self._ended: str | None = None

    @classmethod
    def create(
        cls,
        model_path: str,
        learner: LearnerConfig,
        algo: AlgoConfig | None,
        dtype: str = "float32",
        temperature: float = 1.0,
        seed: int = 0,
    ) -> Self:
        """Ask the cluster for the ranks' actors.

        Args:
            model_path: folder of the model to train, which is also the reference of the divergence.
            algo: the loss of ``update``; None for supervised training only, without a reference model.
            temperature: the one the responses are sampled at.
        """
        env: dict[str, str] = {}
        if not learner.gpus:
            env |= {"DS_ACCELERATOR": "cpu", "OMP_WAIT_POLICY": "PASSIVE"}  # spinning threads take others' cores
        if learner.threads:
            env["OMP_NUM_THREADS"] = str(learner.threads)
        actor: Any = ray.remote(LearnerRank)
        actor = actor.options(num_cpus=learner.cpus, num_gpus=learner.gpus, runtime_env={"env_vars": env})
        numbers = range(learner.world_size)
        return cls([actor.remote(i, model_path, learner, algo, dtype, temperature, seed) for i in numbers], learner)

    async def start(self) -> None:
        """Load the model on all ranks and build their engines."""
        limit = self._config.start_timeout_s
        host, port = (await self._call("listen", timeout_s=limit, ranks=self._ranks[:1]))[0]
        await self._call("start", host, port, timeout_s=limit)

    async def update(self, batch: Sequence[ray.ObjectRef]) -> dict[str, float]:
        """Train on a batch of groups; each reference holds one group's ``list[TurnSample]``.

        Returns the figures of :func:`asyncrl.learner.report.merge`.
        """
        return merge(await self._call("update", list(batch)))

    async def sft_step(self, rows: Sequence[Row], lr: float) -> dict[str, float]:
        """One supervised step."""
        return merge(await self._call("sft_step", list(rows), lr))

    async def logprobs(self, probes: Sequence[Probe], temperature: float = 1.0) -> list[list[float]]:
        """Log-probs of ``ids[start:]`` for each (ids, start), under the current weights."""
        merged: dict[int, list[float]] = {}
        for part in await self._call("logprobs", list(probes), temperature):
            merged |= part
        return [merged[i] for i in range(len(probes))]

    async def connect(self, generators: Sequence[Any], timeout_s: float) -> None:
        """Set up weight transfer to the generators (actor handles), each of whose calls may take ``timeout_s``."""
        await self._call("connect", list(generators), timeout_s, timeout_s=self._config.start_timeout_s)

    async def send_weights(self, members: Sequence[int]) -> dict[int, str]:
        """Hand the current weights to the connected generators of these indices, which must be paused.

        Returns the indices of those that do not hold the weights whole, with the reason (empty: only because another
        failed, in a transfer that takes all or none).
        """
        return (await self._call("send_weights", list(members)))[0]

    async def save(self, path: str) -> None:
        """Write a checkpoint that Transformers and vLLM load to the new folder ``path``, whole when this returns."""
        await self._call("save", path)

    async def load_state(self, path: str) -> int:
        """Resume from a checkpoint folder; returns its update count."""
        return int((await self._call("load_state", path))[0])

    async def shutdown(self) -> None:
        self._end("it was shut down")

    def _end(self, why: str) -> None:
        if self._ended is None:
            self._ended = why
            for rank in self._ranks:
                ray.kill(rank)

    async def _call(
        self, method: str, *args: Any, timeout_s: float | None = None, ranks: Sequence[Any] | None = None
    ) -> list[Any]:
        if self._ended is not None:
            raise LearnerError(f"learner group has ended: {self._ended}")
        timeout_s = self._config.update_timeout_s if timeout_s is None else timeout_s
        refs = [getattr(rank, method).remote(*args) for rank in (self._ranks if ranks is None else ranks)]
        tasks = [asyncio.ensure_future(ref) for ref in refs]
        try:
            await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
            if _failures(tasks):
                await asyncio.wait(tasks, timeout=GRACE_S)
            if failures := _failures(tasks):
                rank, error = min(failures.items(), key=lambda item: (not isinstance(item[1], RayActorError), item[0]))
                self._end(f"rank {rank} failed in {method}")
                raise LearnerError(f"learner group: rank {rank} failed in {method}: {error}") from error
            if late := [rank for rank, task in enumerate(tasks) if not task.done()]:
                self._end(f"{method} took too long")
                raise LearnerError(
                    f"learner group: rank(s) {late} did not finish {method} within {timeout_s:g} s; "
                    "raise learner.start_timeout_s or learner.update_timeout_s if the work is that large"
                )
            return [task.result() for task in tasks]
        except BaseException:
            self._end(f"{method} was cancelled")  # unless it has been ended for a reason of its own
            # The call of a killed rank ends with it: after this none of them does anything any more.
            await asyncio.wait(tasks, timeout=GRACE_S)
            _failures(tasks)  # seen: asyncio logs those nobody asks for
            raise
        finally:
            for task in tasks:
                task.cancel()


def _failures(tasks: Sequence[asyncio.Future[Any]]) -> dict[int, BaseException]:
    return {
        rank: error
        for rank, task in enumerate(tasks)
        if task.done() and not task.cancelled() and (error := task.exception()) is not None
    }
