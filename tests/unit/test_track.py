"""Sinks, the tracker's steps and isolation, the run folder, and what a resume does with them."""

import io
import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from asyncrl.config.load import ConfigError
from asyncrl.track.base import Histograms, Metrics, Tracker, bin_values
from asyncrl.track.console import ConsoleSink
from asyncrl.track.jsonl import JsonlSink, mend, records, supersede
from asyncrl.track.rundir import RunDir, git_state
from asyncrl.view.curve import read_curve


class Memory:
    def __init__(self, fail_at: int | None = None) -> None:
        self.steps: list[int] = []
        self.versions: list[int] = []
        self.fail_at = fail_at
        self.closed = 0

    def log(self, step: int, version: int, metrics: Metrics, histograms: Histograms) -> None:
        if step == self.fail_at:
            raise OSError("disk full")
        self.steps.append(step)
        self.versions.append(version)

    def close(self) -> None:
        self.closed += 1


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_record_is_a_step_of_its_own_whatever_its_version() -> None:
    sink = Memory()
    tracker = Tracker([sink], step=7)
    for version in (0, 1, 1, 5):
        tracker.log(version, {})
    assert sink.steps == [7, 8, 9, 10]
    assert sink.versions == [0, 1, 1, 5]
    assert tracker.step == 11


def test_a_failing_sink_is_dropped_and_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    bad, good = Memory(fail_at=1), Memory()
    tracker = Tracker([bad, good])
    for version in range(10, 14):
        tracker.log(version, {"x": 1.0})
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
    sink.log(3, 2, {"loss": 0.5, "count": 7, "bad": float("nan"), "worse": float("inf")}, {"lag": [0, 1, 1]})
    record = lines(tmp_path / "m.jsonl")[0]
    sink.close()
    assert (record["step"], record["version"], record["loss"], record["count"]) == (3, 2, 0.5, 7)
    assert record["bad"] is None
    assert record["worse"] is None
    assert record["histograms"] == {"lag": {"values": [0, 1], "counts": [1, 2]}}


def test_jsonl_takes_numpy_numbers(tmp_path: Path) -> None:
    import numpy as np

    sink = JsonlSink(tmp_path / "m.jsonl")
    sink.log(1, 1, {"f": np.float32(0.5), "i": np.int64(3)}, {"h": np.arange(3)})
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
    sink.log(5, 2, {"success": 0.25, "other": 9.0, "lag_mean": 1.5}, {})
    sink.log(6, 3, {"other": 9.0}, {})
    sink.close()
    assert out.getvalue() == "version 2 of 3  success=0.25  lag_mean=1.5\n"


def test_console_shows_progress_and_values_on_a_terminal() -> None:
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True, force_interactive=True)
    with Tracker([ConsoleSink(total=8, console=console)]) as tracker:
        tracker.log(3, {"eval/success": 0.25})
    assert "3/8" in out.getvalue()
    assert "0.25" in out.getvalue()


def test_the_bar_of_a_resumed_run_starts_at_its_version() -> None:
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True, force_interactive=True)
    ConsoleSink(total=8, console=console, version=5).close()
    assert "5/8" in out.getvalue()


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
    run.add_start()
    [start] = json.loads((run.path / "run.json").read_text())["starts"]
    assert set(start["git"]) == {"commit", "dirty"}
    assert start["versions"]["asyncrl"] == "0.1.0"
    assert start["command"]
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


def test_a_folder_is_opened_as_it_is(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "run", "a: 1\n")
    run.add_start()
    before = {path: path.stat().st_mtime_ns for path in run.path.iterdir()}
    assert RunDir.open(run.path).path == run.path
    assert {path: path.stat().st_mtime_ns for path in run.path.iterdir()} == before


@pytest.mark.parametrize(("lacks", "message"), [("run.json", "no run.json"), ("config.yaml", "no config.yaml")])
def test_what_is_no_run_folder_is_answered(lacks: str, message: str, tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "run", "a: 1\n")
    run.add_start()
    (run.path / lacks).unlink()
    with pytest.raises(ConfigError, match=f"run: not the folder of a run, it has {message}; give one such as"):
        RunDir.open(run.path)


def test_sizes_are_of_the_files_that_are_there(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "run", "a: 1\n")
    assert run.sizes() == {}
    run.metrics.write_text("{}\n")
    run.trees.write_text("{}\n{}\n")
    assert run.sizes() == {"metrics.jsonl": 3, "trees.jsonl": 6}


# What comes back out of JSON as it went in; texts hold newlines and separators too.
values = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
objects = st.dictionaries(st.text().filter(lambda name: name != "superseded"), values | st.lists(values), max_size=4)


@given(st.lists(objects, max_size=6), st.data())
def test_lines_beyond_a_size_are_superseded_and_nothing_else(written: list[dict], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        check_supersede(Path(folder) / "m.jsonl", written, data)


def check_supersede(path: Path, written: list[dict], data: st.DataObject) -> None:
    whole = [json.dumps(record).encode() + b"\n" for record in written]
    kept = data.draw(st.integers(0, len(whole)), "lines before the checkpoint")
    torn = json.dumps(data.draw(objects, "torn record")).encode()
    torn = torn[: data.draw(st.integers(0, len(torn)), "bytes of it")]
    path.write_bytes(b"".join(whole) + torn)
    size = len(b"".join(whole[:kept]))

    assert supersede(path, size) == len(written) - kept
    after = path.read_bytes()
    assert after[:size] == b"".join(whole[:kept])
    assert after.endswith(b"\n") or not after
    expected = written[:kept] + [{**record, "superseded": True} for record in written[kept:]]
    assert list(records(path)) == expected
    assert [entry.name for entry in path.parent.iterdir()] == ["m.jsonl"]

    assert supersede(path, size) == 0, "marked a second time"
    assert path.read_bytes() == after
    path.write_bytes(after + whole[0] if whole else after)
    assert supersede(path, size) == bool(whole), "the lines of the next start, killed in its turn"


def test_a_missing_or_shorter_file_has_nothing_to_supersede(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    assert supersede(path, 0) == 0
    assert not path.exists()
    path.write_text('{"a": 1}\n{"a"')
    assert supersede(path, 100) == 0
    assert path.read_text() == '{"a": 1}\n{"a"'


def test_a_size_inside_a_line_is_answered_and_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    for size in (1, 8, 10, 17):
        with pytest.raises(ValueError, match=rf"m\.jsonl: no line ends at byte {size};"):
            supersede(path, size)
    assert path.read_text() == '{"a": 1}\n{"a": 2}\n'
    assert list(tmp_path.iterdir()) == [path]


def test_a_last_line_cut_short_is_mended(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    for content, kept in [(b"", b""), (b'{"a', b""), (b"{}\n", b"{}\n"), (b'{}\n{}\n{"a', b"{}\n{}\n")]:
        path.write_bytes(content)
        mend(path)
        assert path.read_bytes() == kept
    mend(tmp_path / "absent.jsonl")
    assert not (tmp_path / "absent.jsonl").exists()


def test_a_curve_leaves_out_what_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    batches = [{"rollout/success": share, "rollout/tokens": 4} for share in (0.25, 0.5, 0.75)]
    batches[1]["superseded"] = True
    path.write_text("".join(json.dumps(batch) + "\n" for batch in batches) + '{"rollout/succ')
    curve = read_curve(path)
    assert (curve.success.tolist(), curve.tokens.tolist()) == ([0.25, 0.75], [4, 8])


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
