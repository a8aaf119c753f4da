"""Admission by pacing: which tasks may start, and which finished groups make the next training batch.

A group admitted at version ``a`` must be trained at a version of at most ``a + max_lag``, its deadline; as its tokens
are generated at version ``a`` or later, no sample is then ever staler than ``max_lag``. Every training batch takes
exactly ``groups_per_batch`` groups and moves the version by one.

Invariant (Hall's condition): before the batch of version ``v`` is chosen, for every ``k >= 0`` the outstanding groups
with a deadline of at most ``v + k`` number at most ``groups_per_batch * (k + 1)``. Admission keeps it by bounding the
outstanding groups; ``choose`` keeps it by waiting for a late group rather than training others past it. So nothing is
ever thrown away for being stale, and the bound holds always.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Admission:
    """Pure bookkeeping over (admission key, admission version) pairs; owns no tasks and no clock."""

    def __init__(self, groups_per_batch: int, max_lag: int) -> None:
        self.groups_per_batch = groups_per_batch
        self.max_lag = max_lag

    def may_admit(self, outstanding: int) -> bool:
        """Whether one more task may start at the current version.

        Args:
            outstanding: groups running, ready or in the batch being trained now.
        """
        return outstanding < self.groups_per_batch * (self.max_lag + 1)

    def choose(self, version: int, ready: Sequence[tuple[int, int]], running: Iterable[int]) -> list[int] | None:
        """Keys of the groups to train at ``version``, earliest deadline first, or None to wait.

        Args:
            ready: (key, admission version) of finished groups.
            running: admission versions of groups that still expand.
        """
        if len(ready) < self.groups_per_batch:
            return None
        order = sorted(ready, key=lambda group: (group[1], group[0]))
        batch, rest = order[: self.groups_per_batch], order[self.groups_per_batch :]
        left = sorted([admitted for _, admitted in rest] + list(running))
        for position, admitted in enumerate(left):
            # The group at this position is trained at best `position // groups_per_batch + 1` versions from now.
            if version + 1 + position // self.groups_per_batch > admitted + self.max_lag:
                return None
        return [key for key, _ in batch]
