"""Which rows go through the model together: a plan that every rank computes for itself and that is the same on all.

Invariants: a pure function of its arguments; every row is in exactly one micro-batch; no micro-batch of two or more
rows exceeds the token budget; every rank has the same number of micro-batches (collectives must match), the missing
ones being empty lists, which become rows without weight.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

Plan = list[list[list[int]]]
"""``plan[rank][i]`` lists the row indexes of that rank's i-th micro-batch."""


def plan(lengths: Sequence[int], tokens_per_micro_batch: int, world_size: int) -> Plan:
    """Pack rows into micro-batches of at most ``tokens_per_micro_batch`` tokens and share them out over the ranks.

    Rows are lined up longest first and the line is cut, so a micro-batch holds rows of like length (attention pads to
    its longest). The number of cuts is the least that keeps the budget, rounded up to whole rounds of all ranks; the
    cuts are then placed so that the largest micro-batch is as small as it can be.

    ``lengths``: tokens of each row; a row above the budget gets a micro-batch of its own.
    """
    line = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    rounds = -(-len(_cut(line, lengths, tokens_per_micro_batch)) // world_size)
    budgets = range(1, tokens_per_micro_batch)
    smaller = bisect_left(budgets, True, key=lambda budget: len(_cut(line, lengths, budget)) <= rounds * world_size)
    return _share_out(_cut(line, lengths, 1 + smaller), lengths, rounds, world_size)


def _cut(line: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    batches: list[list[int]] = []
    left = 0
    for row in line:
        if not batches or lengths[row] > left:
            batches.append([])
            left = budget
        batches[-1].append(row)
        left -= lengths[row]
    return batches


def _share_out(batches: list[list[int]], lengths: Sequence[int], rounds: int, world_size: int) -> Plan:
    shares: Plan = [[] for _ in range(world_size)]
    load = [0] * world_size
    tokens = [sum(lengths[row] for row in batch) for batch in batches]
    for i in sorted(range(len(batches)), key=lambda i: (-tokens[i], i)):
        rank = min((r for r in range(world_size) if len(shares[r]) < rounds), key=lambda r: (load[r], r))
        shares[rank].append(batches[i])
        load[rank] += tokens[i]
    for share in shares:
        share.extend([] for _ in range(rounds - len(share)))
    return shares


def split_groups(groups: int, steps: int) -> list[range]:
    """Indexes of the groups of each optimizer step: contiguous, as equal as can be, empty only if there are none."""
    steps = max(1, min(steps, groups))
    edges = [groups * step // steps for step in range(steps + 1)]
    return [range(a, b) for a, b in pairwise(edges)]
