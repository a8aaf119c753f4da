"""The one writer of a run's groups: ``trees.jsonl``, and those that a checkpoint keeps.

Invariant: groups are fetched from the object store here, not in the driver.
"""

import pickle
from pathlib import Path

from asyncrl.rollout.summary import GroupSummary
from asyncrl.track.jsonl import mend
from asyncrl.tree.records import GroupRecord, to_line
from asyncrl.types import TurnSample


class Recorder:
    def __init__(self, path: str) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        mend(Path(path))
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - lives as long as the actor

    def write(self, version: int, update: int, *records: GroupRecord) -> None:
        """Append the groups of one training batch, trained at ``version`` in ``update``."""
        for record in records:
            self._file.write(to_line(record, version=version, update=update) + "\n")
        self._file.flush()

    def keep(self, path: str, summary: GroupSummary, samples: list[TurnSample], record: GroupRecord) -> None:
        """Put a group that has not been trained yet into a file of its own."""
        Path(path).write_bytes(pickle.dumps((summary, samples, record)))

    def bring(self, path: str) -> tuple[GroupSummary, list[TurnSample], GroupRecord]:
        """The inverse of :meth:`keep`."""
        return pickle.loads(Path(path).read_bytes())

    def close(self) -> None:
        self._file.close()
