"""Sinks, the tracker's order and isolation, and the run folder."""

import io
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from asyncrl.track.base import Histograms, Metrics, Tracker, bin_values
from asyncrl.track.console import ConsoleSink
from asyncrl.track.jsonl import JsonlSink
from asyncrl.track.rundir import RunDir, git_state, write_atomic


class Memory:
    def __init__(self, fail_at: int | None = None) -> None:
        self.steps: list[int] = []
        self.fail_at = fail_at
        self.closed = 0

    def log(self, step: int, metrics: Metrics, histograms: Histograms) -> None:
        if step == self.fail_at:
            raise OSError("disk full")
        self.steps.append(step)

    def close(self) -> None:
        self.closed += 1


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_steps_must_not_go_back() -> None:
    sink = Memory()
    tracker = Tracker([sink])
    for step in (0, 1, 1, 5):
        tracker.log(step, {})
    with pytest.raises(ValueError, match="step 4 came after those of step 5"):
        tracker.log(4, {})
    assert sink.steps == [0, 1, 1, 5]


def test_a_failing_sink_is_dropped_and_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    bad, good = Memory(fail_at=1), Memory()
    tracker = Tracker([bad, good])
    for step in range(4):
        tracker.log(step, {"x": 1.0})
    assert bad.steps == [0]
    assert good.steps == [0, 1, 2, 3]
    assert [record.getMessage() for record in caplog.records] == [
        "Memory failed at step 1 and is left out from here on"
    ]


def test_close_reaches_every_sink_once_even_if_one_fails() -> None:
    class Stuck(Memory):
        def close(self) -> None:
            raise RuntimeError("stuck")

    good = [Memory(), Memory()]
    with Tracker([good[0], Stuck(), good[1]]) as tracker:
        tracker.log(1, {})
    tracker.close()
    assert [sink.closed for sink in good] == [1, 1]


def test_jsonl_is_valid_json_with_every_value(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "m.jsonl")
    sink.log(3, {"loss": 0.5, "count": 7, "bad": float("nan"), "worse": float("inf")}, {"lag": [0, 1, 1]})
    record = lines(tmp_path / "m.jsonl")[0]
    sink.close()
    assert (record["step"], record["loss"], record["count"]) == (3, 0.5, 7)
    assert record["bad"] is None
    assert record["worse"] is None
    assert record["histograms"] == {"lag": {"values": [0, 1], "counts": [1, 2]}}


def test_jsonl_takes_numpy_numbers(tmp_path: Path) -> None:
    import numpy as np

    sink = JsonlSink(tmp_path / "m.jsonl")
    sink.log(1, {"f": np.float32(0.5), "i": np.int64(3)}, {"h": np.arange(3)})
    sink.close()
    record = lines(tmp_path / "m.jsonl")[0]
    assert (record["f"], record["i"]) == (0.5, 3)


@pytest.mark.parametrize("values", [[], [2.0], [0, 0, 1], list(range(64))])
def test_few_distinct_values_are_counted_exactly(values: Sequence[float]) -> None:
    binned = bin_values(values)
    assert [v for v, n in zip(binned["values"], binned["counts"], strict=True) for _ in range(int(n))] == sorted(values)


def test_many_values_are_binned_without_loss_of_count() -> None:
    binned = bin_values([i / 7 for i in range(1000)])
    assert sum(binned["counts"]) == 1000
    assert len(binned["edges"]) == len(binned["counts"]) + 1


def test_console_writes_plain_lines_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    sink = ConsoleSink(total=3, headline=["success", "lag_mean"], console=Console(file=out, width=40))
    sink.log(1, {"success": 0.25, "other": 9.0, "lag_mean": 1.5}, {})
    sink.log(2, {"other": 9.0}, {})
    sink.close()
    assert out.getvalue() == "version 1  success=0.25  lag_mean=1.5\n"


def test_console_shows_progress_and_values_on_a_terminal() -> None:
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True, force_interactive=True)
    with Tracker([ConsoleSink(total=8, console=console)]) as tracker:
        tracker.log(3, {"eval/success": 0.25})
    assert "3/8" in out.getvalue()
    assert "0.25" in out.getvalue()


def test_run_folders_never_collide(tmp_path: Path) -> None:
    names = [RunDir.create(tmp_path, "run", "a: 1\n").path.name for _ in range(3)]
    assert names == ["run", "run-2", "run-3"]


def test_replace_keeps_the_old_run_aside(tmp_path: Path) -> None:
    for i in range(3):
        run = RunDir.create(tmp_path, "quickstart", f"n: {i}\n", replace=True)
        assert run.path == tmp_path / "quickstart"
    read = {path.name: (path / "config.yaml").read_text() for path in tmp_path.iterdir()}
    assert read == {"quickstart": "n: 2\n", "quickstart-old-1": "n: 0\n", "quickstart-old-2": "n: 1\n"}


def test_a_new_run_records_where_it_came_from(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "deep" / "er", "x", "env: 1\n")
    record = json.loads((run.path / "run.json").read_text())
    assert set(record["git"]) == {"commit", "dirty"}
    assert record["versions"]["asyncrl"] == "0.1.0"
    assert run.checkpoints.is_dir()
    assert not run.summary.exists()
    run.write_summary({"updates": 3})
    assert json.loads(run.summary.read_text()) == {"updates": 3}
    assert sorted(path.name for path in run.path.iterdir()) == [
        "checkpoints",
        "config.yaml",
        "run.json",
        "summary.json",
    ]
    assert os.fspath(run) == str(run.path)


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary.json"
    write_atomic(path, "old")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_git_state_sees_commit_and_dirt(tmp_path: Path) -> None:
    assert git_state(tmp_path) == {"commit": None, "dirty": None}

    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    git("init")
    git("commit", "--allow-empty", "-m", "first")
    clean = git_state(tmp_path)
    assert len(clean["commit"]) == 40
    assert clean["dirty"] is False
    (tmp_path / "new").write_text("x")
    assert git_state(tmp_path) == {"commit": clean["commit"], "dirty": True}


@pytest.mark.parametrize(
    ("mode", "environment", "expected"),
    [
        ("auto", {}, "offline"),
        ("auto", {"WANDB_API_KEY": "k" * 40}, "online"),
        ("auto", {"WANDB_API_KEY": "k" * 40, "WANDB_MODE": "offline"}, "offline"),
        ("auto", {"WANDB_MODE": "disabled"}, "disabled"),
        ("offline", {"WANDB_API_KEY": "k" * 40, "WANDB_MODE": "online"}, "offline"),
        ("online", {}, "online"),
    ],
)
def test_wandb_mode(
    mode: str, environment: dict[str, str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from asyncrl.track.wandb import resolve_mode

    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert resolve_mode(mode) == expected


def test_wandb_login_is_found_in_netrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncrl.track.wandb import logged_in

    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    (tmp_path / "netrc").write_text("machine example.org login user password x\n")
    assert not logged_in()
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password x\n")
    assert logged_in()
