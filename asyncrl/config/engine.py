"""The generator actors and their vLLM engines."""

from typing import Literal

from pydantic import Field

from asyncrl.config.base import Strict


class EngineConfig(Strict):
    generators: int = Field(1, ge=1)
    """Generator actors, one engine each."""
    gpus: float = Field(0, ge=0)
    """GPUs of one generator: 0 for the CPU, 1 for its own, or a part of the one GPU that it shares with the learner."""
    cpus: float = Field(1, ge=0)
    """CPUs Ray reserves for one generator."""
    max_num_seqs: int = Field(64, ge=1)
    """Requests in flight in one engine."""
    max_model_len: int = Field(2560, ge=64)
    kv_cache_gib: float | None = Field(None, gt=0)
    """KV cache. Unset: 1 on the CPU; on a GPU, what vLLM finds to be left of ``gpu_memory_utilization``, for which the
    GPU's free memory must not change while the engine starts: set this where others share the GPU."""
    gpu_memory_utilization: float = Field(0.85, gt=0, lt=1)
    """Share of the GPU that must be free when the engine starts; without ``kv_cache_gib``, what the engine takes."""
    enforce_eager: bool = True
    prefix_caching: bool = True
    kv: Literal["keep", "recompute"] = "keep"
    """After a publish: running requests keep their cached prefix, or have it recomputed under the new weights."""
    start_timeout_s: float = Field(300, gt=0)
    generate_timeout_s: float = Field(300, gt=0)
    publish_timeout_s: float = Field(120, gt=0)
