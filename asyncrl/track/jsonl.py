"""JSON lines: one object a record, flushed at once, so that a killed run loses at most a half-written last line.

A record is ``{"step": int, "version": int, "time": unix seconds, name: number, ..., "histograms": {name: see
bin_values}}``. Numbers that JSON cannot hold (NaN, infinities) are written as null. ``"superseded": true`` marks a
record of work that a resumed run did again: readers leave it out.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from asyncrl.track.aside import replacing
from asyncrl.track.base import Histograms, Metrics, bin_values


class JsonlSink:
    def __init__(self, path: Path) -> None:
        mend(path)
        self._file = path.open("ab")

    def log(self, step: int, version: int, metrics: Metrics, histograms: Histograms) -> None:
        record: dict[str, Any] = {"step": step, "version": version, "time": round(time.time(), 3), **metrics}
        if histograms:
            record["histograms"] = {name: bin_values(values) for name, values in histograms.items()}
        self._file.write(to_json(record, inf_nan_mode="null", fallback=float) + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def records(path: Path) -> Iterator[dict[str, Any]]:
    """Every whole line of a file, superseded ones too, oldest first."""
    with path.open(encoding="utf-8") as file:
        yield from (json.loads(line) for line in file if line.endswith("\n"))


def mend(path: Path) -> None:
    """Cut a last line without its newline off a file that is to grow again; a missing file stays missing."""
    if path.exists():
        with path.open("rb+") as file:
            file.truncate(sum(len(line) for line in file if line.endswith(b"\n")))


def supersede(path: Path, size: int) -> int:
    """Mark what a run wrote after the checkpoint it goes on from, when the file had ``size`` bytes.

    Every whole line beyond gets ``"superseded": true``, a last line without its newline is cut off; all at once or not
    at all. A file that is missing or not longer stays as it is.

    Returns lines marked that were not before.

    Raises ValueError: no line ends at ``size``: the file is not the one the checkpoint knew.
    """
    if not path.exists() or path.stat().st_size <= size:
        return 0
    at = marked = 0
    with path.open("rb") as source, replacing(path) as out:
        for line in source:
            begin, at = at, at + len(line)
            if begin < size < at:
                raise ValueError(f"{path}: no line ends at byte {size}; the file was changed after the checkpoint")
            if begin >= size:
                if not line.endswith(b"\n"):
                    break
                record = json.loads(line)
                marked += "superseded" not in record
                line = json.dumps(record | {"superseded": True}).encode() + b"\n"
            out.write(line)
    return marked
