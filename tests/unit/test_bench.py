"""Benchmarks over doubles of the runs: what is run with which overrides, what the tables and files say."""

import json
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from asyncrl import cli
from asyncrl.bench import asynchrony, compare, control, runs
from asyncrl.config.load import ConfigError, load

RATES = {"sync": 20.0, "one_step": 30.0, "async": 45.0}


class Runs:
    """Stands in for ``asyncrl train`` and ``asyncrl sft``: remembers its command lines and writes what a run leaves."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, ...]] = []
        self.successes = iter([0.5, 0.6, 0.1, 0.2])

    def command(self, log: Path, *arguments: str) -> None:
        self.lines.append(arguments)
        given = dict(argument.split("=", 1) for argument in arguments[2:] if "=" in argument)
        if arguments[0] == "sft":
            Path(arguments[arguments.index("--out") + 1]).mkdir(parents=True)
            return
        load(Path(arguments[1]), arguments[2:])  # the configuration takes every override
        folder = Path(given["track.dir"]) / given["track.name"]
        folder.mkdir(parents=True)
        mode = given.get("runtime.mode", "async")
        rate = RATES[mode] * (2 if given.get("env.latency.median_s") == "0" else 1)
        final = next(self.successes, 0.75)
        summary = {
            "groups": 36, "turn_samples": 900, "tokens_generated": 12_000,
            "tokens_per_success": 1000 * final if final > 0.1 else None,
            "lag_mean": 0.5, "lag_max": 2,
            "success_coldstart": 0.25, "success_final": final, "seconds": {"train": 900 / rate, "total": 100},
            "profile": {
                "turn_samples_per_s": rate, "trainer_wait_share": 0.5, "train_share": 0.3, "publish_share": 0.1,
                "generator_idle_share": 0.25, "env_idle_share": 0.75, "admission_blocked_share": 0.125,
            },
        }  # fmt: skip
        (folder / "summary.json").write_text(json.dumps(summary))
        (folder / "run.json").write_text(
            json.dumps({"versions": {"python": "3"}, "host": {"cpus": 2}, "started": "now"})
        )
        tokens = {"a": 6000, "b": 4000}.get(Path(arguments[1]).stem, 5000)
        lines: list[dict[str, Any]] = [{"eval/success": 0.25}]
        lines += [{"rollout/success": 0.5, "rollout/tokens": tokens / 2}] * 2 + [{"eval/success": final}]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Runs:
    double = Runs()
    monkeypatch.setattr(runs, "command", double.command)
    monkeypatch.setattr(asynchrony, "command", double.command)
    return double


def config(folder: Path, name: str = "c", sft: str = "sft: {}") -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(f"env: {{name: pantry}}\n{sft}\n")
    return path


def cells(table: str) -> list[list[str]]:
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert len({len(line) for line in lines}) == 1 and set(lines[1]) == {"---"}
    return [lines[0], *lines[2:]]


def test_async_runs_every_mode_at_every_latency_from_one_cold_start(tmp_path: Path, double: Runs) -> None:
    out, to = tmp_path / "out", tmp_path / "deep" / "async.json"
    given = ["runtime.max_lag=4", "eval.tasks=9"]
    modes = ["sync", "one_step", "async"]
    path = config(tmp_path)
    table = asynchrony.measure(path, given, out, modes, ["0.3", "0"], to)

    cold, *trained = double.lines
    assert cold == ("sft", str(path), "--out", str(out / "coldstart"), *given)
    resolved = [load(path, line[2:]) for line in trained]
    assert [(run.runtime.mode, run.env.latency and run.env.latency.median_s) for run in resolved] == [
        (mode, median) for median in (0.3, 0.0) for mode in modes
    ]
    for run in resolved:
        assert run.sft is None and run.model.path == str(out / "coldstart")
        assert run.env.latency and run.env.latency.sigma == 1.2
        assert run.eval.tasks == 9 and run.runtime.checkpoint_every > run.runtime.versions
    # Nothing but the mode, the latency and the folder differs.
    plain = {run.model_copy(update={"runtime": None, "env": None, "track": None}).model_dump_json() for run in resolved}
    same = {run.runtime.model_copy(update={"mode": "sync"}) for run in resolved}
    slots = {run.env.workers * run.env.slots_per_worker for run in resolved}
    assert len(plain) == len(same) == len(slots) == 1

    header, *rows = cells(table)
    assert header[:5] == ["mode", "latency, s", "turn samples/s", "to sync", "trainer wait"]
    assert rows[2] == [
        "async",
        "0.3",
        "45.0",
        "2.25",
        "50.0%",
        "25.0%",
        "75.0%",
        "10.0%",
        "12.5%",
        "0.50",
        "2",
        "10.0%",
    ]
    assert [(row[0], row[1], row[3]) for row in rows[3:]] == [
        ("sync", "0", "1.00"), ("one_step", "0", "1.50"), ("async", "0", "2.25"),
    ]  # fmt: skip
    report = json.loads(to.read_text())
    assert (report["host"], report["command"], report["started"]) == ({"cpus": 2}, sys.argv, "now")
    assert [run["turn_samples_per_s"] for run in report["runs"]] == [20, 30, 45, 40, 60, 90]
    assert report["runs"][0]["seconds_train"] == 45.0 and report["runs"][0]["turn_samples"] == 900

    asynchrony.measure(path, given, out, modes, ["0.3", "0"], to)
    assert len(double.lines) == 7  # what is there is not run again


def test_async_without_a_cold_start_or_a_sync_run(tmp_path: Path, double: Runs) -> None:
    table = asynchrony.measure(config(tmp_path, sft=""), [], tmp_path / "out", ["async"], ["0"], tmp_path / "j.json")
    assert [line[0] for line in double.lines] == ["train"]
    assert not any(argument.startswith(("sft", "model.path")) for argument in double.lines[0])
    assert cells(table)[1][:4] == ["async", "0", "90.0", ""]


def test_compare_tabulates_gain_and_success_at_equal_tokens(tmp_path: Path, double: Runs) -> None:
    out = tmp_path / "out"
    those = compare.variants([config(tmp_path, "a"), config(tmp_path, "b")], [])
    table = compare.compare(those, ["3", "4"], out, ["tree.leaves=6"])
    assert table == (out / "table.md").read_text() and (out / "curves.png").exists()
    assert cells(table) == [
        ["run", "seed", "cold start", "final", "gain", "at 4k tokens", "tokens", "per success", "seconds"],
        ["a", "3", "25.0%", "50.0%", "+25.0", "41.7%", "12k", "500", "100"],  # two thirds of the way from 25 % to 50 %
        ["a", "4", "25.0%", "60.0%", "+35.0", "48.3%", "12k", "600", "100"],
        ["**a**", "mean", "25.0%", "55.0%", "+30.0", "45.0%", "", "550", ""],
        ["b", "3", "25.0%", "10.0%", "-15.0", "10.0%", "12k", "", "100"],
        ["b", "4", "25.0%", "20.0%", "-5.0", "20.0%", "12k", "200", "100"],
        ["**b**", "mean", "25.0%", "15.0%", "-10.0", "15.0%", "", "", ""],
    ]
    seeds = [(run.runtime.seed, run.tree.leaves) for run in _loaded(double)]
    assert seeds == [(3, 6), (4, 6)] * 2


def test_a_sweep_runs_every_combination_of_values(tmp_path: Path, double: Runs) -> None:
    those = compare.variants([config(tmp_path)], ["tree.roots=2,3", "tree.leaves=6,7"])
    table = compare.compare(those, ["0"], tmp_path / "out")
    sizes = [(roots, leaves) for roots in (2, 3) for leaves in (6, 7)]
    assert [(run.tree.roots, run.tree.leaves) for run in _loaded(double)] == sizes
    labels = [row[0] for row in cells(table)[1::2]]
    assert labels == [f"c tree.roots={roots} tree.leaves={leaves}" for roots, leaves in sizes]


@pytest.mark.parametrize("vary", [["tree.leaves=6,6"], ["tree.leaves"], ["tree.leaves="]])
def test_a_sweep_that_cannot_be_told_apart_or_has_no_values_is_refused(tmp_path: Path, vary: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"name c-tree.leaves-6;|--vary tree.leaves=?: give a key and its values"):
        compare.variants([config(tmp_path)], vary)


def test_a_sweep_over_a_value_that_no_run_takes_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, double: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["bench", "compare", str(config(tmp_path)), "--out", str(tmp_path / "out"), "--vary", "tree.roots=2,0"]
    monkeypatch.setattr(sys, "argv", ["asyncrl", *line])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert (ended.value.code, double.lines) == (2, [])
    assert "tree.roots" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--modes", "sync,sink", "runtime.mode"),
        ("--latency", "0.3,-1", "env.latency.median_s"),
        ("--latency", "x", "got"),
    ],
)
def test_async_refuses_what_no_run_would_take(
    option: str, value: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, double: Runs,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    line = ["bench", "async", str(config(tmp_path)), "--out", str(tmp_path / "out"), "--json", str(tmp_path / "j.json")]
    monkeypatch.setattr(sys, "argv", ["asyncrl", *line, option, value])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert (ended.value.code, double.lines) == (2, [])
    assert said in capsys.readouterr().err


def test_async_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, double: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["bench", "async", str(config(tmp_path)), "runtime.max_lag=3", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["asyncrl", *line, "--json", str(tmp_path / "j.json"), "--latency", "0.5"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    assert [row[:2] for row in cells(capsys.readouterr().out.strip())[1:]] == [
        ["sync", "0.5"], ["one_step", "0.5"], ["async", "0.5"],
    ]  # fmt: skip
    assert all("runtime.max_lag=3" in line for line in double.lines)


def _loaded(double: Runs) -> list[Any]:
    return [load(Path(line[1]), line[2:]) for line in double.lines]


def test_a_stopped_run_is_removed_and_run_again(tmp_path: Path, double: Runs) -> None:
    (tmp_path / "a-1" / "checkpoints").mkdir(parents=True)
    assert runs.train_once(config(tmp_path), tmp_path, "a-1", [])["groups"] == 36
    assert not (tmp_path / "a-1" / "checkpoints").exists()


def test_a_command_that_fails_names_its_log(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "check.log"
    with pytest.raises(RuntimeError, match=rf"asyncrl env failed with exit code 2: see {log}"):
        runs.command(log, "env", "check", "nowhere")
    assert "'nowhere' is not registered" in log.read_text()
    runs.command(log, "env", "list")
    assert "pantry" in log.read_text()


def test_an_interrupt_ends_the_run_that_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, log = tmp_path / "python", tmp_path / "log"
    script.write_text(
        "#!/bin/sh\ntrap 'sleep 0.2; echo ended; exit 143' TERM\necho began\nwhile :; do sleep 0.05; done\n"
    )
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not (log.exists() and "began" in log.read_text()):
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            return
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(KeyboardInterrupt):
            runs.command(log, "train")
    finally:
        signal.signal(signal.SIGALRM, before)
    assert log.read_text() == "began\nended\n"


def test_what_control_costs_is_told_as_a_share_of_the_plain_engines_median() -> None:
    lines = control.table({"plain": [900.0, 1000.0, 1400.0], "top 20": [800.0, 500.0, 600.0]}).splitlines()
    assert lines[2:] == ["| plain | 1,000 | 1.000 | 900 to 1,400 |", "| top 20 | 600 | 0.600 | 500 to 800 |"]
