"""Causal attention within the rows of a packed row, as a Transformers attention function.

Invariants: a token attends to itself and the tokens before it in its own row, nothing else; no mask the size of
tokens x tokens is ever made. The model's forward is given ``index=RowIndex`` and hands it down unchanged. The rows are
laid out as a rectangle padded on the right, where plain causal attention keeps padding out of sight, so PyTorch's fused
kernels apply on every device; a variable-length kernel, which needs no rectangle, would replace this function only.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from asyncrl.learner.batch import RowIndex

NAME = "asyncrl_rows"


def row_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    index: RowIndex,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Query, key, value: (1, heads, tokens, width), keys and values with their own number of heads.

    Returns (1, tokens, heads, width) and no attention weights.

    Raises ValueError: a row longer than the model's sliding window.
    """
    if sliding_window is not None and index.longest > sliding_window:
        raise ValueError(
            f"a row of {index.longest} tokens exceeds the model's sliding window of {sliding_window}; "
            "train with shorter rows or a model with full attention"
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    q, k, v = (
        x.index_select(0, index.to_rows).view(index.rows, index.longest, *x.shape[1:]).transpose(1, 2)
        for x in (q, k, v)
    )
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, index.to_packed).unsqueeze(0), None


def register() -> str:
    """Make it known to Transformers; returns the name it has there."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, row_attention)
    return NAME
