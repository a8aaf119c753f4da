"""How unsure the policy is, token by token and turn by turn (T2PO; C is DeepConf's token confidence).

Invariants: natural log; signals are of the distribution at temperature 1; M and Phi are high where the policy is
unsure. Leading dimensions are sequences, none of which another's values depend on. Arithmetic is in float32 at least
and stays finite for one-hot and for flat distributions over any vocabulary.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

LOG_FLOOR = -100.0
"""Lower logits, below the highest, count as this: float32 has no probability there, and C stays finite."""
RANGE_MIN = 1e-8
"""A smaller range tells nothing: the normalised value is 0."""
M_MIN = 1e-6
"""Min-max makes M zero somewhere in nearly every turn, and one zero would make a geometric mean zero."""
BRANCH_TOP, BRANCH_TOKENS = 10, 20
"""SPARK's entropy criterion looks at the 10 likeliest of each of a turn's first 20 tokens."""
CHUNK = 128
"""Of a large vocabulary, what is looked through as one for its highest logits."""


class TokenSignals(NamedTuple):
    """Of next-token distributions p (...): H = -sum p log p; C = -(1/j) sum of log p over the j likeliest (high when
    sure), or log max p; max p; and the 10 likeliest tokens' part of H, over log V."""

    entropy: Tensor
    confidence: Tensor
    p_max: Tensor
    top_entropy: Tensor


def token_signals(logits: Tensor, top_j: int | None) -> TokenSignals:
    """Signals of raw ``logits`` (..., V).

    Args:
        top_j: j of C; None takes log max p in its place, as the authors' code does.

    Raises:
        ValueError: ``top_j`` is 1, where C would be high when unsure, or exceeds the vocabulary.
    """
    vocab = logits.shape[-1]
    if top_j is not None and not 2 <= top_j <= vocab:
        raise ValueError(
            f"top_j must be in 2..{vocab} (the vocabulary), got {top_j}; at 1, C would be high when unsure"
        )
    logits = logits if logits.dtype == torch.float64 else logits.float()
    top = top_values(logits, min(vocab, max(BRANCH_TOP, top_j or 1)))
    below = (logits - top[..., :1]).clamp_min(LOG_FLOOR)
    weight = below.exp()
    total = weight.sum(-1)
    log_p = (top - top[..., :1]).clamp_min(LOG_FLOOR) - total.log()[..., None]
    best = log_p[..., :BRANCH_TOP]
    return TokenSignals(
        # Both terms are non-negative: nothing cancels, however peaked p is.
        entropy=total.log() - (weight * below).sum(-1) / total,
        confidence=log_p[..., 0] if top_j is None else -log_p[..., :top_j].mean(-1),
        p_max=1 / total,
        top_entropy=-(best.exp() * best).sum(-1) / math.log(vocab),
    )


def top_values(logits: Tensor, k: int) -> Tensor:
    """The ``k`` highest of ``logits`` (..., V), in order.

    Of a large vocabulary only some chunks are sorted: the k highest lie in the k chunks that have the highest maxima.
    """
    whole, rest = logits[..., : logits.shape[-1] // CHUNK * CHUNK], logits.shape[-1] % CHUNK
    chunks = whole.unflatten(-1, (-1, CHUNK))
    if chunks.shape[-2] <= 2 * k:
        return logits.topk(k).values
    best = chunks.amax(-1).topk(k).indices[..., None].expand(*logits.shape[:-1], k, CHUNK)
    found = chunks.gather(-2, best).flatten(-2)
    return torch.cat([found, logits[..., logits.shape[-1] - rest :]], -1).topk(k).values


def calibrate(value: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """``value`` from [low, high] to [0, 1]; 0 where that is no range beyond rounding."""
    rounding = 8 * torch.finfo(value.dtype).eps * torch.maximum(low.abs(), high.abs())
    known = high - low > rounding.clamp_min(RANGE_MIN)
    return torch.where(known, (value - low) / torch.where(known, high - low, 1.0), 0.0)


def fuse(entropy_n: Tensor, confidence_n: Tensor, alpha: float) -> Tensor:
    """M = alpha Hn + (1 - alpha)(1 - Cn), of values in [0, 1]."""
    return alpha * entropy_n + (1 - alpha) * (1 - confidence_n)


def running(entropy: Tensor, confidence: Tensor, extremes: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """M (...) of one more token, on the scale of its sequence's tokens so far, and the extremes with it.

    Args:
        extremes: (..., 4), minima of H, C, -H and -C over the tokens before; infinity at the first.
    """
    extremes = torch.minimum(extremes, torch.stack([entropy, confidence, -entropy, -confidence], -1))
    low_h, low_c, minus_high_h, minus_high_c = extremes.unbind(-1)
    entropy_n, confidence_n = calibrate(entropy, low_h, -minus_high_h), calibrate(confidence, low_c, -minus_high_c)
    return fuse(entropy_n, confidence_n, alpha), extremes


def fixed(entropy: Tensor, p_max: Tensor, vocab: int, alpha: float) -> Tensor:
    """M on fixed scales: H over log V, and max p in place of the normalised confidence."""
    return fuse((entropy / math.log(vocab)).clamp(0, 1), p_max, alpha)


def turn(entropy: Tensor, confidence: Tensor, mask: Tensor, alpha: float) -> Tensor:
    """M as printed, once the turn is over: on the scale of all tokens in ``mask`` (..., T); arbitrary outside it."""

    def scaled(value: Tensor) -> Tensor:
        low = torch.where(mask, value, torch.inf).amin(-1, keepdim=True)
        return calibrate(value, low, torch.where(mask, value, -torch.inf).amax(-1, keepdim=True))

    return fuse(scaled(entropy), scaled(confidence), alpha)


def turn_signal(m: Tensor, mask: Tensor) -> Tensor:
    """Phi = exp(mean log M) over the tokens in ``mask`` (..., T), M held above ``M_MIN``; NaN where there are none."""
    return (torch.where(mask, m.clamp_min(M_MIN).log(), 0.0).sum(-1) / mask.sum(-1)).exp()
