"""TensorBoard event files in the run folder, one a start; what a resume superseded is purged from the curves."""

from pathlib import Path

import numpy as np
from tensorboardX import SummaryWriter

from asyncrl.track.base import Histograms, Metrics


class TensorboardSink:
    def __init__(self, folder: Path, step: int = 0, purge: int = 0) -> None:
        """``step`` is the first of this start; earlier ones from ``purge`` on are hidden."""
        # The writer names files by the second and overwrites: two starts within one need the suffix. A kill loses what
        # has not been flushed.
        self._writer = SummaryWriter(str(folder), purge_step=purge, flush_secs=5, filename_suffix=f".{step}")

    def log(self, step: int, version: int, metrics: Metrics, histograms: Histograms) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        for name, values in histograms.items():
            if len(values):
                self._writer.add_histogram(name, np.asarray(values, dtype=np.float64), step)

    def close(self) -> None:
        self._writer.close()
