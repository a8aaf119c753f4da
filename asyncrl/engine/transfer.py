"""Weights from learner to generators: every call into vLLM's weight-transfer interface is here.

Invariants:

* The CPU transport is all or nothing. Buckets are staged beside the model; the model changes only in
  ``finish_weight_update``, so a transfer that fails before that leaves the old weights serving.
* Every learner rank iterates the whole source in every round, also after the sender's transfer has failed: iteration is
  a collective, and a rank that stopped early would leave the others waiting.
* Nothing outlives a transfer: between generator and engine process the bytes lie in anonymous memory, which goes with
  the last process that holds it.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save
from vllm.distributed.weight_transfer import (
    ModuleSource,
    ParamMeta,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferEngine,
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    WeightTransferInitInfo,
    WeightTransferInitRequest,
    WeightTransferUpdateInfo,
    WeightTransferUpdateRequest,
)

from asyncrl.engine.base import buckets, cause_of

__all__ = [
    "ModuleSource",
    "ParamMeta",
    "WeightSource",
    "abandon",
    "backend_for",
    "local_request",
    "make_trainer",
    "register_transports",
    "replaces_at_once",
]

Backend = Literal["asyncrl_cpu", "ipc"]
CPU: Backend = "asyncrl_cpu"
BUCKET_BYTES = 256 * 2**20
"""Bytes of weights in one ``update_weights``: bounds the sender's and the object store's extra memory."""


def backend_for(gpu: bool, colocated: bool) -> Backend:
    """The transport between a learner and generators: shared memory without GPUs, CUDA IPC on a GPU that they share.

    Raises:
        ValueError: learner and generators have whole GPUs.
    """
    if gpu and not colocated:
        raise ValueError(
            "whole-GPU layouts need the NCCL transport, which is not there yet; "
            "give learner and generator parts of one GPU (gpus below 1)"
        )
    return "ipc" if gpu else CPU


def replaces_at_once(backend: Backend) -> bool:
    """Whether an unfinished transfer leaves the old weights whole; the other transports overwrite them in place."""
    return backend == CPU


def register_transports() -> None:
    """Make the CPU transport known to vLLM's two factories; idempotent."""
    for factory, name in (
        (WeightTransferEngineFactory, "CpuReceiver"),
        (WeightTransferTrainerFactory, "CpuTrainer"),
    ):
        with suppress(ValueError):  # already registered
            factory.register_engine(CPU, __name__, name)


# ---- learner side ----------------------------------------------------------------------------------------------------


@dataclass
class CpuTrainerInit(TrainerInitInfo):
    backend: ClassVar[str] = CPU


class CpuTrainer(TrainerWeightTransferEngine[CpuTrainerInit]):
    """Sends a ``WeightSource`` through Ray's object store, one copy a bucket however many generators there are."""

    init_info_cls = CpuTrainerInit
    source: WeightSource

    @classmethod
    def trainer_init(
        cls, init_info: CpuTrainerInit, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        if source is None:
            raise ValueError("the CPU transport needs a WeightSource")
        if init_info.is_sender:
            client.init_weight_transfer_engine({})
        return cls(client=client, source=source, is_sender=init_info.is_sender)

    def send_weights(self) -> None:
        """One round; called on every rank. Raises on the sender what went wrong in a generator."""
        if not self.is_sender:
            for _ in self.source:
                pass
            return
        failure: Exception | None = None
        try:
            self.client.start_weight_update()
        except Exception as error:
            failure = error
        for bucket in buckets(self.source, _nbytes, BUCKET_BYTES):
            if failure is None:
                try:
                    # Inside a list the reference travels as such: each generator fetches the bytes itself.
                    self.client.update_weights({"bucket": [ray.put(_packed(bucket))]})
                except Exception as error:
                    failure = error
        if failure is not None:
            raise failure
        self.client.finish_weight_update()


def _nbytes(pair: tuple[str, torch.Tensor]) -> int:
    return pair[1].numel() * pair[1].element_size()


def _packed(bucket: Sequence[tuple[str, torch.Tensor]]) -> NDArray[np.uint8]:
    """Safetensors bytes; an array, because Ray stores arrays out of band and readers share them."""
    # Sources may yield views of one flat buffer, which safetensors refuses: every tensor gets memory of its own.
    own = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in bucket}
    return np.frombuffer(save(own), dtype=np.uint8)


class GeneratorClient:
    """vLLM's control-plane protocol over Ray actor handles; unlike its ready-made Ray client, every call has a bound.

    Raises:
        RuntimeError: a generator failed or did not answer; the message names the call and the generator.
    """

    def __init__(self, handles: Sequence[Any], timeout_s: float) -> None:
        self._handles = list(handles)
        self._timeout_s = timeout_s

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init_weight_transfer_engine", WeightTransferInitRequest(init_info=init_info))

    def start_weight_update(self) -> None:
        self._call("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._call("update_weights", WeightTransferUpdateRequest(update_info=update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish_weight_update")
        if weight_version is not None:
            self._call("update_weight_version", weight_version)

    def _call(self, method: str, *args: Any) -> None:
        calls = {getattr(handle, method).remote(*args): handle for handle in self._handles}
        done, late = ray.wait(list(calls), num_returns=len(calls), timeout=self._timeout_s)
        if late:
            raise RuntimeError(
                f"publish: {method} not answered within {self._timeout_s:g} s by {[calls[ref] for ref in late]}; "
                "raise engine.publish_timeout_s if the generator is alive"
            )
        for ref in done:
            try:
                ray.get(ref)
            except Exception as error:
                raise RuntimeError(f"publish: {method} failed in {calls[ref]}: {cause_of(error)}") from error


def make_trainer(
    backend: Backend, handles: Sequence[Any], source: WeightSource, rank: int, timeout_s: float
) -> TrainerWeightTransferEngine[Any]:
    """The sending end; made on every learner rank, after which ``send_weights()`` is called on every rank.

    Args:
        handles: generator actors; only rank 0 talks to them.
        source: yields every parameter under its Hugging Face name, re-iterable, the same order on all ranks.
        timeout_s: longest a single call to the generators may take.
    """
    register_transports()
    init: TrainerInitInfo
    if backend == CPU:
        init = CpuTrainerInit(rank=rank)
    else:
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        init = IPCTrainerInitInfo(rank=rank, packed=True)
    client = GeneratorClient(handles, timeout_s)
    return WeightTransferTrainerFactory.trainer_init(init, client=client, source=source)


# ---- generator actor -------------------------------------------------------------------------------------------------


@asynccontextmanager
async def local_request(request: WeightTransferUpdateRequest) -> AsyncIterator[WeightTransferUpdateRequest]:
    """The request as the engine process can read it: a bucket in the object store becomes a path on this host."""
    update = request.update_info
    if not (isinstance(update, dict) and "bucket" in update):
        yield request
        return
    (reference,) = update["bucket"]
    data = await reference
    memory = os.memfd_create("asyncrl-weights")
    try:
        with os.fdopen(memory, "wb", closefd=False) as file:
            file.write(data)
        yield WeightTransferUpdateRequest(update_info={"path": f"/proc/{os.getpid()}/fd/{memory}"})
    finally:
        os.close(memory)


async def abandon(engine: Any) -> None:
    """Close a transfer session that its learner left open, so that the next can begin.

    vLLM has no call for it, but a refused update ends the session, and every transport refuses an empty one.
    """
    with suppress(Exception):
        await engine.update_weights(WeightTransferUpdateRequest(update_info={}))


# ---- engine process --------------------------------------------------------------------------------------------------


@dataclass
class CpuInit(WeightTransferInitInfo):
    pass


@dataclass
class CpuUpdate(WeightTransferUpdateInfo):
    path: str
    """A safetensors file on this host."""


class CpuReceiver(WeightTransferEngine[CpuInit, CpuUpdate]):
    """Stages buckets, then loads them all into the model on ``finish_weight_update``."""

    init_info_cls = CpuInit
    update_info_cls = CpuUpdate
    _staged: dict[str, torch.Tensor]

    def init_transfer_engine(self, init_info: CpuInit) -> None:
        self._staged = {}

    def start_weight_update(self) -> None:
        self._staged = {}

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # Not the base class's: it ends with an accelerator's synchronize, which a CPU build refuses.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: CpuUpdate) -> None:
        self._staged.update(load_file(update_info.path))

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        staged, self._staged = self._staged, {}
        if not staged:
            raise RuntimeError("finish_weight_update: no weights were received in this round")
        # Linear weights are packed for the CPU and their parameters emptied: loading goes layer by layer, unpacked.
        initialize_layerwise_reload(self.model)
        model: Any = self.model
        model.load_weights(iter(staged.items()))
        finalize_layerwise_reload(self.model, self.model_config)
        if self.model_config.hf_text_config.tie_word_embeddings:
            # The tied head has no weights of its own to load, so nothing above re-packs it.
            head = model.lm_head
            head.quant_method.process_weights_after_loading(head)

    def shutdown(self) -> None:
        self._staged = {}
