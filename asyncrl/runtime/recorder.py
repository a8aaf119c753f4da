"""The one writer of ``trees.jsonl``. Groups are fetched from the object store here, not in the driver."""

from __future__ import annotations

from pathlib import Path

from asyncrl.tree.records import GroupRecord, mend, to_line


class Recorder:
    def __init__(self, path: str) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        mend(path)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - lives as long as the actor

    def write(self, version: int, update: int, *records: GroupRecord) -> int:
        """Append the groups of one training batch, trained at ``version`` in ``update``."""
        for record in records:
            self._file.write(to_line(record, version=version, update=update) + "\n")
        self._file.flush()
        return len(records)

    def close(self) -> None:
        self._file.close()
