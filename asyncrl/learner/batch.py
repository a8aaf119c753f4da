"""Rows laid end to end in one packed row, and what is read back out of it.

Invariants: positions restart at each row and no token attends beyond its own row (``attention.py``); targets and
digests are read from the packed tensor itself, not from the samples it was made from; a row of weight 0 trains nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from asyncrl.algo.loss import Columns
from asyncrl.config.algo import AlgoConfig
from asyncrl.types import Row, TurnSample, token_digest

Rows: TypeAlias = Sequence[Row | TurnSample]

PADDING = TurnSample((0,), (0,), (False,), (0.0,), 0.0, 0.0, 0, (), group=-1, node=-1)
"""What an empty micro-batch holds, so that a rank without rows still takes part in the collectives."""


@dataclass(frozen=True, slots=True)
class RowIndex:
    """Where the rows of a packed row lie, for attention within rows.

    ``to_rows`` (rows * longest,) lists, row by row, the packed positions that fill a rectangle padded on the right;
    ``to_packed`` (tokens,) finds each packed token in that rectangle.
    """

    to_rows: Tensor
    to_packed: Tensor
    rows: int
    longest: int


@dataclass(frozen=True, slots=True)
class Packed:
    """A micro-batch. ``tokens`` counts all tokens, ``T`` the response tokens in row order."""

    input_ids: Tensor
    """(1, tokens) int64."""
    position_ids: Tensor
    """(1, tokens) int64."""
    at: Tensor
    """(T,) packed positions of the response tokens; the one before each predicts it."""
    row: Tensor
    """(T,) which row each response token belongs to."""
    index: RowIndex

    @property
    def targets(self) -> Tensor:
        """(T,) the response tokens."""
        return self.input_ids[0, self.at]


def pack(rows: Rows, device: torch.device | str = "cpu") -> Packed:
    """Lay one or more rows end to end.

    Raises ValueError: a row without a prompt token to predict its first response token from.
    """
    prompts = np.array([len(row.prompt_ids) for row in rows])
    if (prompts < 1).any():
        raise ValueError(f"row {int(prompts.argmin())} has an empty prompt: its first response token has no context")
    responses = np.array([len(row.response_ids) for row in rows])
    lengths = prompts + responses
    edges = np.concatenate(([0], lengths.cumsum()))
    parts = [part for row in rows for part in (row.prompt_ids, row.response_ids)]
    ids = np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])
    positions = np.arange(edges[-1]) - np.repeat(edges[:-1], lengths)
    owner = np.repeat(np.arange(len(rows)), lengths)
    at = np.flatnonzero(positions >= prompts[owner])
    longest = int(lengths.max())
    column = np.arange(longest)
    # A padded slot repeats the row's last token: causal attention never lets a real token see it.
    rectangle = edges[:-1, None] + np.minimum(column, lengths[:, None] - 1)
    in_row = column < lengths[:, None]

    def tensor(values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device)

    index = RowIndex(tensor(rectangle.reshape(-1)), tensor(np.flatnonzero(in_row)), len(rows), longest)
    return Packed(tensor(ids)[None], tensor(positions)[None], tensor(at), tensor(owner[at]), index)


def columns(
    samples: Sequence[TurnSample], device: torch.device | str = "cpu", proximal: Tensor | None = None
) -> Columns:
    """Columns of shape (T,), as ``proximal`` is, in the order of ``pack``'s response tokens.

    Raises ValueError: a sample whose ids, mask and log-probs differ in length.
    """
    for sample in samples:
        if not len(sample.response_ids) == len(sample.loss_mask) == len(sample.logprobs):
            raise ValueError(
                f"sample (group {sample.group}, node {sample.node}): {len(sample.response_ids)} response ids, "
                f"{len(sample.loss_mask)} mask entries and {len(sample.logprobs)} log-probs; they must be equally many"
            )
    sizes = torch.tensor([len(sample.response_ids) for sample in samples])
    starts = sizes.cumsum(0) - sizes

    def per_token(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32).repeat_interleave(sizes).to(device)

    def flat(parts: list[Sequence[float]]) -> Tensor:
        return torch.from_numpy(np.concatenate([np.asarray(part, dtype=np.float32) for part in parts])).to(device)

    return Columns(
        flat([sample.logprobs for sample in samples]),
        per_token([sample.advantage_pos for sample in samples]),
        per_token([sample.advantage_neg for sample in samples]),
        per_token([sample.copies for sample in samples]) * flat([sample.loss_mask for sample in samples]),
        starts.repeat_interleave(sizes).to(device),
        proximal,
    )


def weight(samples: Sequence[TurnSample]) -> int:
    """What the summed loss of ``samples`` is divided by: trained tokens, each as often as its turn has copies."""
    return sum(sample.copies * sum(sample.loss_mask) for sample in samples)


def with_gradient(samples: Sequence[TurnSample], algo: AlgoConfig) -> tuple[list[TurnSample], list[TurnSample]]:
    """Those that the model has to see, at least one, and those that it need not: without divergence and entropy bonus
    the loss of a turn without advantage is constant. The weight it is divided by counts both."""
    if algo.kl_coef > 0 or algo.entropy_coef > 0:
        return list(samples), []
    seen: list[TurnSample] = []
    idle: list[TurnSample] = []
    for sample in samples:
        (seen if sample.advantage_pos or sample.advantage_neg else idle).append(sample)
    if not seen:
        seen.append(idle.pop(next(i for i, sample in enumerate(idle) if sample.copies)))
    return seen, idle


def digests(packed: Packed) -> list[str]:
    """Digest of each row's response ids as they lie in the packed tensor, in row order."""
    counts = torch.bincount(packed.row, minlength=packed.index.rows).cpu().numpy()
    return [token_digest(part) for part in np.split(packed.targets.cpu().numpy(), counts.cumsum()[:-1])]
