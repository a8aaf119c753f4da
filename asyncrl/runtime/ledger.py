"""What became of every task that a run has taken from its sampler.

Invariant: a task's position in the sampler's order is entered once, as trained, or with the named reason why not; a
second entry is refused. With the checkpoint that holds it, the ledger is the proof that training was exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

TRAINED = "trained"
LATE = "late"
"""Given up under ``runtime.late: drop``."""
GIVEN_UP = "given_up"
"""Lost with every attempt."""


@dataclass(frozen=True, slots=True)
class Entry:
    position: int
    """The task's number in the sampler's order; tasks come again in later passes, positions don't."""
    env: str
    task: str
    seed: int
    key: int
    """Admission number of the attempt that was trained, or was the last."""
    outcome: str
    version: int
    """The learner's version when the task was trained or given up."""
    update: int = 0
    """Optimizer steps made by the end of its batch."""
    rows: int = 0
    """Turn samples trained on."""
    digest: str = ""
    """Of the rows' response tokens, in their order."""
    cause: str = ""


class Ledger:
    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._entries: dict[int, Entry] = {}
        for entry in entries:
            self.add(entry)

    def add(self, entry: Entry) -> None:
        """Raises RuntimeError when the task's end has been entered before."""
        if entry.position in self._entries:
            raise RuntimeError(
                f"task {entry.position} ({entry.env}/{entry.task}) would be entered as {entry.outcome}, but was "
                f"{self._entries[entry.position].outcome} at version {self._entries[entry.position].version} already"
            )
        self._entries[entry.position] = entry

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def count(self, outcome: str) -> int:
        return sum(entry.outcome == outcome for entry in self)

    def to_json(self) -> list[dict[str, Any]]:
        return [asdict(entry) for entry in self]

    @classmethod
    def from_json(cls, entries: Iterable[dict[str, Any]]) -> Ledger:
        return cls(Entry(**entry) for entry in entries)
