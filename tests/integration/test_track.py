"""Real sinks, W&B's own process included."""

import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from asyncrl.config.track import TrackConfig
from asyncrl.track.open import open_tracker
from asyncrl.track.rundir import RunDir


@pytest.mark.integration
def test_all_sinks_together_write_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    run = RunDir.create(tmp_path, "run", "a: 1\n")
    with open_tracker(TrackConfig(wandb="offline"), run, {"a": 1}, total=2) as tracker:
        tracker.log(0, {"success": 0.25})
        tracker.log(1, {"success": 0.5}, {"lag": [0, 1, 2], "empty": []})
    assert [record["success"] for record in map(json.loads, run.metrics.read_text().splitlines())] == [0.25, 0.5]
    events = EventAccumulator(str(run.path / "tensorboard")).Reload()
    assert [event.value for event in events.Scalars("success")] == [0.25, 0.5]
    assert events.Histograms("lag")[0].histogram_value.num == 3
    assert list(run.path.glob("wandb/offline-run-*/*.wandb"))
