"""What became of every task that a run has taken from its sampler.

Invariant: a task's position in the sampler's order is entered once, as trained, or with the named reason why not; a
second entry is refused. With the checkpoint that holds it, the ledger is the proof that training was exactly once.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import fmean, median

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
    seconds: float
    """That its attempt took."""
    solved: bool = False
    """A leaf succeeded; false where nobody knows."""
    update: int = 0
    """Optimizer steps made by the end of its batch."""
    rows: int = 0
    """Turn samples trained on."""
    digest: str = ""
    """Of the rows' response tokens, in their order."""
    cause: str = ""


@dataclass(slots=True)
class Ledger:
    entries: dict[int, Entry] = field(default_factory=dict)
    """By position."""

    def add(self, entry: Entry) -> None:
        """Raises RuntimeError when the task's end has been entered before."""
        if earlier := self.entries.get(entry.position):
            raise RuntimeError(
                f"task {entry.position} ({entry.env}/{entry.task}) would be entered as {entry.outcome}, but was "
                f"{earlier.outcome} at version {earlier.version} already"
            )
        self.entries[entry.position] = entry

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries.values())

    def bias(self) -> dict[str, float]:
        """Whether training sees fewer long or hard tasks than came to an end, as it does where late ones are dropped.

        A task is long if its attempt took longer than the median of all so far, and hard if no leaf is known to have
        succeeded: what is left out must not look easier than it may be.

        Returns shares ``bias/{long,hard}_{ended,trained}``, equal where all are trained; one of nothing is left out.
        """
        middle = median(entry.seconds for entry in self) if self.entries else 0.0
        shares: dict[str, float] = {}
        for name, some in ("ended", [*self]), ("trained", [entry for entry in self if entry.outcome == TRAINED]):
            if some:
                shares[f"bias/long_{name}"] = fmean(entry.seconds > middle for entry in some)
                shares[f"bias/hard_{name}"] = fmean(not entry.solved for entry in some)
        return shares
