"""Which task comes next. Invariant: the n-th task is a pure function of (tasks, seed, n), on any number of workers."""

import random
from collections.abc import Sequence

from asyncrl.types import Task


class TaskSampler:
    """Passes over the split in a fresh order each, every task once a pass."""

    def __init__(self, env: str, ids: Sequence[str], seed: int) -> None:
        self._env, self._ids, self._seed = env, list(ids), seed
        self._epoch, self._order = -1, list(ids)

    def task(self, n: int) -> Task:
        epoch, position = divmod(n, len(self._ids))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(self._ids)
            random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
        return Task(self._env, self._order[position], self._seed)
