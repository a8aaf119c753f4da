"""JSON lines: one object a record, flushed at once, so that a killed run loses at most a half-written last line.

A record is ``{"step": int, "time": unix seconds, name: number, ..., "histograms": {name: see bin_values}}``.
Numbers that JSON cannot hold (NaN, infinities) are written as null.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

from asyncrl.track.base import Histograms, Metrics, bin_values


class JsonlSink:
    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Metrics, histograms: Histograms) -> None:
        record: dict[str, Any] = {"step": step, "time": round(time.time(), 3)}
        record |= {name: _number(value) for name, value in metrics.items()}
        if histograms:
            record["histograms"] = {name: bin_values(values) for name, values in histograms.items()}
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _number(value: float) -> int | float | None:
    if isinstance(value, int):
        return int(value)
    value = float(value)
    return value if math.isfinite(value) else None
