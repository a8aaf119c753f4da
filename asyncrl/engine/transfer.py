"""Weights from learner to generators: every call into vLLM's weight-transfer interface is here.

Invariants:

* A generator that fails leaves the round, the others get all weights; NCCL, where nobody can leave, fails for all. No
  failure of a generator is raised in the learner.
* Every learner rank iterates the whole source in every round, also after generators have failed: iteration is a
  collective, and a rank that stopped early would leave the others waiting.
* Nothing outlives a transfer: between generator and engine process the bytes lie in anonymous memory, which goes with
  the last process that holds it.
"""

import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save
from vllm.distributed.weight_transfer import (
    ModuleSource,
    ParamMeta,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferEngine,
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.base import (
    WeightTransferInitInfo,
    WeightTransferInitRequest,
    WeightTransferUpdateInfo,
    WeightTransferUpdateRequest,
)
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
from vllm.distributed.weight_transfer.packed_tensor import DEFAULT_PACKED_BUFFER_SIZE_BYTES
from vllm.utils.network_utils import get_open_port

from asyncrl.engine.base import BUCKET_BYTES, buckets
from asyncrl.engine.client import GeneratorClient, leave

__all__ = ["ModuleSource", "ParamMeta", "Sender", "WeightSource", "backend_for", "deliver", "meet"]

Backend = Literal["asyncrl_cpu", "ipc", "nccl"]
CPU: Backend = "asyncrl_cpu"
IPC: Backend = "ipc"
NCCL: Backend = "nccl"
GRACE_S = 5.0
"""What a sender waits beyond the bound of its calls, which say who did not answer."""
POLL_S = 0.1


def backend_for(gpus: float) -> Backend:
    """The transport of an actor with that many GPUs: shared memory without any, CUDA IPC on one that is shared."""
    return CPU if gpus == 0 else IPC if gpus < 1 else NCCL


def register_transports() -> None:
    """Make the CPU transport's receiving end known to vLLM; idempotent."""
    with suppress(ValueError):  # already registered
        WeightTransferEngineFactory.register_engine(CPU, __name__, "CpuReceiver")


# ---- learner side ----------------------------------------------------------------------------------------------------


def send_buckets(client: VLLMWeightSyncClient, source: WeightSource, is_sender: bool) -> None:
    """The CPU transport: through Ray's object store, one copy a bucket however many generators there are."""
    if not is_sender:
        for _ in source:
            pass
        return
    client.start_weight_update()
    for bucket in buckets(source, lambda pair: pair[1].nbytes, BUCKET_BYTES):
        # Inside a list the reference travels as such: each generator fetches the bytes itself.
        client.update_weights({"bucket": [ray.put(_packed(bucket))]})
    client.finish_weight_update()


def _packed(bucket: Sequence[tuple[str, torch.Tensor]]) -> NDArray[np.uint8]:
    """Safetensors bytes; an array, because Ray stores arrays out of band and readers share them."""
    # Sources may yield views of one flat buffer, which safetensors refuses: every tensor gets memory of its own.
    own = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in bucket}
    return np.frombuffer(save(own), dtype=np.uint8)


@dataclass(eq=False)
class Sender:
    """The sending end; made on every learner rank, after which :meth:`send` is called on all ranks together.

    Generators are met again, over NCCL in a new group, when those that take part change or one of them has failed.
    """

    backend: Backend
    handles: Sequence[Any]
    """Generator actors; only rank 0 talks to them."""
    source: WeightSource
    """Yields every parameter under its Hugging Face name, re-iterable, the same order on all ranks."""
    rank: int
    timeout_s: float
    """Longest a single call to the generators may take."""

    def __post_init__(self) -> None:
        self._members: list[int] = []
        self._trainer: Any = None
        self._client = GeneratorClient({}, self.timeout_s)

    def send(self, members: Sequence[int]) -> dict[int, str]:
        """One round to the generators of these indices, all of them paused.

        Returns, on rank 0, those without the whole new weights, and why (empty: only because another lacks them).
        """
        if list(members) != self._members or self._client.failed:
            leave(self._client.group)
            self._members = list(members)
            handles = {at: self.handles[at] for at in members}
            self._client = GeneratorClient(handles, self.timeout_s, collective=self.backend == NCCL)
            try:
                self._meet()
            except Exception as error:
                if not (self._client.failed or isinstance(error, TimeoutError)):
                    raise
                for _ in self.source:  # the other ranks are in it
                    pass
                others = "" if self._client.failed else str(error)
                self._client.failed = dict.fromkeys(members, others) | self._client.failed
                return self._client.failed
        if self.backend == CPU:
            send_buckets(self._client, self.source, is_sender=self.rank == 0)
        else:
            self._trainer.send_weights()
        return self._client.failed

    def _meet(self) -> None:
        if self.backend == CPU:
            if self.rank == 0:
                self._client.init_weight_transfer_engine({})
            return
        sizes = [math.prod(meta.shape) * meta.dtype.itemsize for meta in self.source.metadata()]
        packed: Any = {"packed": True, "packed_buffer_size_bytes": max(DEFAULT_PACKED_BUFFER_SIZE_BYTES, *sizes)}
        client, source = self._client, self.source
        if self.backend == IPC:
            info = IPCTrainerInitInfo(rank=self.rank, **packed)
            self._trainer = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
            return
        address, world_size = (ray.util.get_node_ip_address(), get_open_port()), 1 + len(self._members)
        nccl = NCCLTrainerInitInfo(*address, world_size, rank=self.rank, **packed)
        self._trainer = handshake(
            lambda: WeightTransferTrainerFactory.trainer_init(nccl, client=client, source=source),
            self.timeout_s + GRACE_S,
            given_up=lambda: bool(client.failed),
        )
        client.group = self._trainer.model_update_group
        if client.failed:
            leave(client.group)


def handshake(meet: Callable[[], Any], seconds: float, given_up: Callable[[], bool] = lambda: False) -> Any:
    """What ``meet`` returns: an engine of vLLM's for NCCL, in whose making all members of a group wait for one another.

    vLLM's own bounds are minutes, or none. When nobody waits for it any more, ``meet`` goes on in a thread of its own;
    a group that still comes of it is left.

    Raises TimeoutError: it took longer than ``seconds``, or ``given_up`` came first.
    """
    met: Future[Any] = Future()

    def run() -> None:  # at the thread's first device, the only one that Ray shows a process of ours
        try:
            met.set_result(meet())
        except BaseException as error:
            met.set_exception(error)

    threading.Thread(target=run, name="weight-transfer handshake", daemon=True).start()
    until = time.monotonic() + seconds
    while not met.done() and not given_up() and time.monotonic() < until:
        wait([met], timeout=POLL_S)
    if met.done():
        return met.result()
    met.add_done_callback(lambda late: None if late.exception() else leave(late.result().model_update_group))
    raise TimeoutError(f"the handshake took longer than {seconds:g} s; raise engine.publish_timeout_s if that is short")


# ---- generator actor -------------------------------------------------------------------------------------------------


async def meet(engine: Any, backend: Backend, init_info: dict[str, Any], clean: bool, timeout_s: float) -> None:
    """Connect an engine to a sender, out of whatever an earlier one has left behind.

    ``clean``: no transfer was broken off. One that was has left layers half loaded, and vLLM would count what they hold
    towards the next transfer: they are closed, with the weights they have, before it begins.
    """
    if not clean:
        with suppress(Exception):  # refused while the broken session is still open
            await engine.start_weight_update()
        await engine.finish_weight_update()
    await engine.shutdown_weight_transfer_engine()
    if backend == NCCL:
        await engine.collective_rpc(meet_within, kwargs={"init_info": init_info, "seconds": timeout_s})
    else:
        await engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info))


async def deliver(
    engine: Any, backend: Backend, update: dict[str, Any], check: Callable[[], None], timeout_s: float
) -> None:
    """Hand one update to the engine process, in a form that it can read and within bounds that it can keep.

    ``check``: raises when the update has come too late, or become so on its way.
    """
    check()
    if backend == NCCL:
        await engine.collective_rpc(receive_within, kwargs={"update": update, "seconds": timeout_s})
    elif backend == IPC:
        await engine.update_weights(WeightTransferUpdateRequest(update_info=update))
    else:  # a bucket in the object store becomes a path on this host
        (reference,) = update["bucket"]
        data = await reference
        check()
        with os.fdopen(os.memfd_create("asyncrl-weights"), "wb") as file:
            file.write(data)
            file.flush()
            path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
            await engine.update_weights(WeightTransferUpdateRequest(update_info={"path": path}))


# ---- engine process --------------------------------------------------------------------------------------------------


def meet_within(worker: Any, init_info: dict[str, Any], seconds: float) -> None:
    """Meet the sender and the other generators, within a bound of our own: they may never come."""
    engine = copy(worker.weight_transfer_engine)  # what comes late must not replace what was met since

    def meet() -> Any:
        engine.init_transfer_engine(engine.parse_init_info(init_info))
        return engine

    worker.weight_transfer_engine = handshake(meet, seconds)


def receive_within(worker: Any, update: dict[str, Any], seconds: float) -> None:
    """Take part in a broadcast, which has no bound of its own: leave the group when the others never come."""
    group = worker.weight_transfer_engine.model_update_group
    watchdog = threading.Timer(seconds, leave, [group])
    watchdog.start()
    try:
        worker.update_weights(update)
    finally:
        watchdog.cancel()
    if not group.available:
        raise TimeoutError(f"the broadcast did not end within {seconds:g} s")


@dataclass
class CpuUpdate(WeightTransferUpdateInfo):
    path: str
    """A safetensors file on this host."""


class CpuReceiver(WeightTransferEngine[WeightTransferInitInfo, CpuUpdate]):
    """Stages buckets, then loads them all into the model on ``finish_weight_update``."""

    init_info_cls = WeightTransferInitInfo
    update_info_cls = CpuUpdate
    _staged: dict[str, torch.Tensor]

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
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
        # Linear weights are packed for the CPU and their parameters emptied: loading goes layer by layer, unpacked.
        initialize_layerwise_reload(self.model)
        model: Any = self.model
        try:
            model.load_weights(iter(staged.items()))
        finally:  # or what a layer has half loaded would count towards its next weights
            finalize_layerwise_reload(self.model, self.model_config)
        if self.model_config.hf_text_config.tie_word_embeddings:
            # The tied head has no weights of its own to load, so nothing above re-packs it.
            head = model.lm_head
            head.quant_method.process_weights_after_loading(head)

    def shutdown(self) -> None:
        self._staged = {}
