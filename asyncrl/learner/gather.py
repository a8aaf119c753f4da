"""A learner's weights, whole, whatever the ZeRO stage.

Invariants: names are the Hugging Face parameter names, tied weights appear once; all ranks iterate in lockstep, since
gathering a shard is a collective; at most one bucket is gathered at a time beyond what the consumer keeps.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

BUCKET_BYTES = 256 * 2**20
"""Parameters gathered together under ZeRO-3; a larger one is gathered alone."""


def full_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Shape of the whole parameter, also where this rank holds a shard."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def full_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Each parameter's name and whole value, detached, in the order of ``named_parameters``."""
    import deepspeed  # only where shards can exist

    for bucket in _buckets(module):
        sharded = [parameter for _, parameter in bucket if hasattr(parameter, "ds_id")]
        with deepspeed.zero.GatheredParameters(sharded, enabled=bool(sharded)):
            # Only views leave here: ZeRO-3 drops its own reference at the end and never writes into the storage.
            whole = [(name, parameter.data) for name, parameter in bucket]
        yield from whole


def _buckets(module: nn.Module) -> Iterator[list[tuple[str, nn.Parameter]]]:
    bucket: list[tuple[str, nn.Parameter]] = []
    size = 0
    for name, parameter in module.named_parameters():
        nbytes = torch.Size(full_shape(parameter)).numel() * parameter.element_size()
        if bucket and size + nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, parameter))
        size += nbytes
    if bucket:
        yield bucket
