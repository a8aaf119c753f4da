"""Real sinks, W&B's own process included, over the starts of one run."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record

from asyncrl.config.track import TrackConfig
from asyncrl.track.jsonl import supersede
from asyncrl.track.open import open_tracker
from asyncrl.track.rundir import RunDir
from asyncrl.track.tensorboard import TensorboardSink
from asyncrl.view.curve import read_curve

OFFLINE = TrackConfig(wandb="offline")
BLOCK, HEADER = 32768, 7
"""Of W&B's offline file, a LevelDB log."""


def wandb_records(path: Path) -> Iterator[Record]:
    content, at, parts = path.read_bytes(), HEADER, b""
    while at + HEADER <= len(content):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        parts += content[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield Record.FromString(parts)
            parts = b""


def in_wandb(run: RunDir) -> tuple[set[str], list[dict[str, Any]], dict[str, str]]:
    """Run ids, history rows in order of step, and the x axis of each metric that has one of its own."""
    ids, rows, axes = set(), [], {}
    for file in run.path.glob("wandb/offline-run-*/*.wandb"):
        for record in wandb_records(file):
            if record.HasField("run"):
                ids.add(record.run.run_id)
            if record.HasField("history"):
                rows.append({"/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item})
            if record.HasField("metric"):
                axes[record.metric.name] = record.metric.step_metric
    return ids, sorted(rows, key=lambda row: row["_step"]), axes


def batch(success: float) -> dict[str, float]:
    return {"rollout/success": success, "rollout/tokens": 10}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    return RunDir.create(tmp_path, "run", "a: 1\n")


@pytest.mark.integration
def test_all_sinks_together_write_offline(run: RunDir) -> None:
    with open_tracker(OFFLINE, run, {"a": 1}, total=2) as tracker:
        tracker.log(0, {"success": 0.25})
        tracker.log(1, {"success": 0.5}, {"lag": [0, 1, 2], "empty": []})
    assert [record["success"] for record in map(json.loads, run.metrics.read_text().splitlines())] == [0.25, 0.5]
    events = EventAccumulator(str(run.path / "tensorboard")).Reload()
    assert [event.value for event in events.Scalars("success")] == [0.25, 0.5]
    assert events.Histograms("lag")[0].histogram_value.num == 3
    _, rows, axes = in_wandb(run)
    assert [(row["_step"], row["version"], row["success"]) for row in rows] == [(0, 0, 0.25), (1, 1, 0.5)]
    assert axes == {"success": "version", "lag": "version"}


@pytest.mark.integration
def test_a_run_that_is_killed_and_resumed_twice_is_one_run(run: RunDir) -> None:
    """Both resumes go back to a checkpoint of version 2, taken after step 3."""
    with open_tracker(OFFLINE, run, {}, total=4) as tracker:
        for loss in (2.0, 1.0):
            tracker.log(0, {"sft/loss": loss})
        for version in (1, 2):
            tracker.log(version, batch(0.25))
        size = run.sizes()["metrics.jsonl"]
        for version in (3, 4):
            tracker.log(version, batch(0.25))
    with run.metrics.open("a") as file:
        file.write('{"step": 6, "ver')  # killed in the middle of a line
    for success, versions, marked in ((0.5, (3,), 2), (0.75, (3, 4), 1)):
        again = RunDir.open(run.path)
        assert supersede(again.metrics, size) == marked
        with open_tracker(OFFLINE, again, {}, total=4) as tracker:
            for version in versions:
                tracker.log(version, batch(success))

    records = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(9))
    assert [record["version"] for record in records] == [0, 0, 1, 2, 3, 4, 3, 3, 4]
    assert [record["step"] for record in records if record.get("superseded")] == [4, 5, 6]
    assert read_curve(run.metrics).success.tolist() == [0.25, 0.25, 0.75, 0.75]
    assert read_curve(run.metrics).tokens.tolist() == [10, 20, 30, 40]

    events = EventAccumulator(str(run.path / "tensorboard")).Reload().Scalars("rollout/success")
    assert [(event.step, event.value) for event in events] == [(2, 0.25), (3, 0.25), (7, 0.75), (8, 0.75)]

    ids, rows, axes = in_wandb(run)
    assert len(ids) == 1
    assert [(row["_step"], row["version"]) for row in rows] == [(r["step"], r["version"]) for r in records]
    assert axes == {"rollout/success": "version", "rollout/tokens": "version"}
    assert len(json.loads((run.path / "run.json").read_text())["starts"]) == 3


@pytest.mark.integration
def test_steps_go_on_after_a_half_written_line(run: RunDir) -> None:
    run.metrics.write_text('{"step": 4, "version": 1, "x": 1}\n{"step": 5, "ver')
    with open_tracker(TrackConfig(wandb="disabled"), run, {}, total=1) as tracker:
        tracker.log(2, {"x": 2})
    records = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert [(record["step"], record["version"]) for record in records] == [(4, 1), (5, 2)]


@pytest.mark.integration
def test_starts_within_one_second_keep_their_events_apart(tmp_path: Path) -> None:
    for step in range(3):
        sink = TensorboardSink(tmp_path, step, purge=step)
        sink.log(step, 0, {"x": step}, {})
        sink.close()
    assert [event.value for event in EventAccumulator(str(tmp_path)).Reload().Scalars("x")] == [0, 1, 2]
