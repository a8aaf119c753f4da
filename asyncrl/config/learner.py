"""The DeepSpeed learner group."""

from typing import Literal

from pydantic import Field

from asyncrl.config.base import Strict


class LearnerConfig(Strict):
    world_size: int = Field(1, ge=1)
    """Learner ranks."""
    gpus: float = Field(0, ge=0)
    """GPUs of one rank: 0 for the CPU, a part of the one GPU it shares with the generators, or 1 of its own."""
    cpus: float = Field(1, ge=0)
    threads: int | None = Field(None, ge=1)
    """CPU threads of one rank; None takes what Ray allows an actor, one for each of ``cpus``, but every core in the
    cold start of a run that starts its own cluster: it has the machine for itself."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    lr: float = Field(1e-6, gt=0)
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = Field(0.01, ge=0)
    warmup_updates: int = Field(0, ge=0)
    grad_clip: float = Field(1.0, gt=0)
    tokens_per_micro_batch: int = Field(16384, ge=64)
    """Token budget of one packed micro-batch of one rank; a longer row gets a micro-batch of its own."""
    updates_per_batch: int = Field(1, ge=1)
    """Updates (optimizer steps) a training batch is split into; each takes whole groups."""
    gradient_checkpointing: bool = False
    start_timeout_s: float = Field(600, gt=0)
    update_timeout_s: float = Field(1800, gt=0)
