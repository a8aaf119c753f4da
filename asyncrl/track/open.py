"""The tracker of a run, from its configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.config.track import TrackConfig
from asyncrl.track.base import Sink, Tracker
from asyncrl.track.console import ConsoleSink
from asyncrl.track.jsonl import JsonlSink
from asyncrl.track.rundir import RunDir


def open_tracker(
    config: TrackConfig, run: RunDir, resolved: Mapping[str, Any], total: int, headline: Sequence[str] = ()
) -> Tracker:
    """JSON lines, TensorBoard and the console always, W&B as configured.

    Args:
        resolved: the whole resolved configuration, for W&B.
        total: the last policy version, for the progress bar.
        headline: metrics the console shows, in order; none shows all.
    """
    # TensorBoard and W&B take seconds to import: only where a run starts.
    from asyncrl.track.tensorboard import TensorboardSink

    sinks: list[Sink] = [JsonlSink(run.metrics), TensorboardSink(run.path / "tensorboard")]
    if config.wandb != "disabled":
        from asyncrl.track.wandb import WandbSink

        sinks.append(WandbSink(config.wandb, config.wandb_project, run.path.name, run.path, resolved))
    sinks.append(ConsoleSink(total, headline))
    return Tracker(sinks)
