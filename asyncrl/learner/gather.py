"""A learner's weights, whole, whatever the ZeRO stage.

Invariants: names are the Hugging Face parameter names, tied weights appear once; all ranks iterate in lockstep, since
gathering a shard is a collective; at most one bucket is gathered at a time beyond what the consumer keeps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor, nn

from asyncrl.engine.base import BUCKET_BYTES, buckets

if TYPE_CHECKING:
    from asyncrl.engine.transfer import WeightSource


def full_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Shape of the whole parameter, also where this rank holds a shard."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def full_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Each parameter's name and whole value, detached, in the order of ``named_parameters``."""
    import deepspeed  # only where shards can exist

    def nbytes(named: tuple[str, nn.Parameter]) -> int:
        return math.prod(full_shape(named[1])) * named[1].element_size()

    for bucket in buckets(module.named_parameters(), nbytes, BUCKET_BYTES):
        sharded = [parameter for _, parameter in bucket if hasattr(parameter, "ds_id")]
        with deepspeed.zero.GatheredParameters(sharded, enabled=bool(sharded)):
            # Only views leave here: ZeRO-3 drops its own reference at the end and never writes into the storage.
            whole = [(name, parameter.data) for name, parameter in bucket]
        yield from whole


def weight_source(module: nn.Module) -> WeightSource:
    """The sending end of a publish: every iteration reads the current values."""
    # vLLM takes seconds to import, and only a publish needs it.
    from asyncrl.engine.transfer import ParamMeta, WeightSource

    class Source(WeightSource):
        def metadata(self) -> list[ParamMeta]:
            return [ParamMeta(name, p.dtype, full_shape(p)) for name, p in module.named_parameters()]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            return full_weights(module)

    return Source()
