"""The DeepSpeed engine of one rank.

Invariants: every call that configures DeepSpeed is in this file; gradients are averaged over the ranks by DeepSpeed and
by nobody else; the caller decides when accumulation ends (``set_gradient_accumulation_boundary``), so one optimizer
step may take any number of micro-batches.
"""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported from C

from asyncrl.config.learner import LearnerConfig


def join(store: TCPStore, rank: int, world_size: int, device: torch.device, timeout_s: float) -> None:
    """Join the process group of all ranks; a collective that waits longer than ``timeout_s`` for a rank raises."""
    import deepspeed  # reads the environment and starts probes: only in the rank's own process
    from deepspeed.utils import logger

    logger.setLevel("WARNING")
    # Ray shows each rank its own GPUs only, so the local one is always number 0.
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0"}
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
    )
    # DeepSpeed would compile its shared-memory all-reduce here (a minute on first use). Only its inference engine
    # calls that op, so it is declared unavailable and gloo does all the work.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=backend, verbose=False)


def build(model: nn.Module, learner: LearnerConfig, dtype: str) -> Any:
    """Wrap ``model`` in a DeepSpeed engine with AdamW at ``learner``'s ZeRO stage."""
    import deepspeed

    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learner.lr, betas=learner.betas, weight_decay=learner.weight_decay
    )
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": learner.grad_clip,
        "bf16": {"enabled": dtype == "bfloat16"},
        "zero_optimization": {"stage": learner.zero_stage, "overlap_comm": False},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**31,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    return engine


def step(engine: Any, lr: float) -> float:
    """Apply the accumulated gradient at rate ``lr``; returns its norm over all parameters, before clipping."""
    for group in engine.optimizer.param_groups:
        group["lr"] = lr
    norm = None
    if engine.zero_optimization_stage() == 0 and not engine.bfloat16_enabled():
        # Plain DeepSpeed clips without keeping the norm; the gradients are averaged by now and whole on every rank.
        norm = nn.utils.get_total_norm([p.grad for p in engine.module.parameters() if p.grad is not None])
    engine.step()
    return float(engine.get_global_grad_norm() if norm is None else norm)
