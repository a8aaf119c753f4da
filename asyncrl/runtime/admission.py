"""Admission by pacing: which tasks may start, and which finished groups make the next training batch.

A group admitted at version ``a`` must be trained at a version of at most ``a + max_lag``, its deadline; as its tokens
are generated at version ``a`` or later, no sample is then ever staler than ``max_lag``. Every training batch takes
exactly ``groups_per_batch`` groups and moves the version by one.

Invariant (Hall's condition): before the batch of version ``v`` is chosen, for every ``k >= 0`` the outstanding groups
with a deadline of at most ``v + k`` number at most ``groups_per_batch * (k + 1)``. Admission keeps it by bounding the
outstanding groups. A group that still runs so late that the next batch would break it is met by ``late``:

* ``wait``: the batch waits for it, so nothing is ever thrown away and the bound holds always;
* ``drop``: it is given up, so the bound holds and a batch waits for no straggler;
* ``correct``: the batch goes, and the late group is trained beyond the bound: only here is the invariant given up.
"""

from collections.abc import Sequence
from typing import NamedTuple

from asyncrl.config.runtime import Late


class Choice(NamedTuple):
    batch: list[int]
    """Keys of the groups to train now, earliest deadline first."""
    dropped: list[int]
    """Keys of running groups that can no longer be trained in time."""


class Admission:
    """Pure bookkeeping over (admission key, admission version) pairs; owns no tasks and no clock."""

    def __init__(self, groups_per_batch: int, max_lag: int, late: Late = "wait") -> None:
        self.groups_per_batch, self.max_lag, self.late = groups_per_batch, max_lag, late
        self.most = groups_per_batch * (max_lag + 1)
        """Groups outstanding at once."""

    def may_admit(self, outstanding: int) -> bool:
        """Whether one more task may start beside ``outstanding`` groups: running, ready or being trained now."""
        return outstanding < self.most

    def choose(
        self, version: int, ready: Sequence[tuple[int, int]], running: Sequence[tuple[int, int]]
    ) -> Choice | None:
        """The batch to train at ``version``, or None to wait.

        Args:
            ready: (key, admission version) of finished groups.
            running: the same of groups that still expand.
        """
        if len(ready) < self.groups_per_batch:
            return None
        order = sorted(ready, key=lambda group: (group[1], group[0]))
        batch = [key for key, _ in order[: self.groups_per_batch]]
        overdue = self._overdue(version + 1, order[self.groups_per_batch :], running)
        if overdue and self.late == "wait":
            return None
        return Choice(batch, overdue if self.late == "drop" else [])

    def _overdue(self, version: int, ready: Sequence[tuple[int, int]], running: Sequence[tuple[int, int]]) -> list[int]:
        """Running groups to give up so that the others can all be trained in time from ``version`` on."""
        left = sorted([(at, False, key) for key, at in ready] + [(at, True, key) for key, at in running])
        overdue: list[int] = []
        still: list[int] = []
        kept = 0
        for admitted, expands, key in left:
            if expands:
                still.append(key)
            kept += 1
            # The last of `kept` groups is trained at best `(kept - 1) // groups_per_batch` versions from then.
            if still and version + (kept - 1) // self.groups_per_batch > admitted + self.max_lag:
                overdue.append(still.pop())
                kept -= 1
        return overdue
