"""TensorBoard event files in the run folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tensorboardX import SummaryWriter

from asyncrl.track.base import Histograms, Metrics


class TensorboardSink:
    def __init__(self, folder: Path) -> None:
        self._writer = SummaryWriter(str(folder))

    def log(self, step: int, metrics: Metrics, histograms: Histograms) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        for name, values in histograms.items():
            if len(values):
                self._writer.add_histogram(name, np.asarray(values, dtype=np.float64), step)

    def close(self) -> None:
        self._writer.close()
