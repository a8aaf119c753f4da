"""A run that is ended in every way and goes on each time: nothing lives on, no task is lost or trained twice."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

from asyncrl.config.load import load
from asyncrl.env import find_env
from asyncrl.runtime.sampler import TaskSampler
from asyncrl.tree.records import read
from tests.conftest import running_generator
from tests.e2e.conftest import start, survivors, wait_for_no_survivor
from tests.recount import recount

EVERY = 3
"""Versions between checkpoints."""
GROUPS = 4
CONFIG = [
    "configs/quickstart.yaml", "sft.trajectories=40", "sft.epochs=1", "eval.tasks=8", "tree.roots=2", "tree.leaves=4",
    f"runtime.groups_per_batch={GROUPS}", f"runtime.checkpoint_every={EVERY}", "track.name=run",
]  # fmt: skip

Moment = Callable[[Path], bool]
How = Literal["SIGINT", "SIGTERM", "SIGKILL", "exception"]
CODES = {"SIGINT": 130, "SIGTERM": 143, "SIGKILL": -9, "exception": 1}


def checkpoints(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").glob("version-*"))


def saved(run: Path) -> int:
    """Version of the newest checkpoint."""
    return int(checkpoints(run)[-1].name.split("-")[1]) if checkpoints(run) else 0


def lines(run: Path) -> list[dict[str, Any]]:
    """The metrics of the lineage."""
    file = run / "metrics.jsonl"
    records = map(json.loads, file.read_text().split("\n")[:-1] if file.exists() else ())
    return [record for record in records if not record.get("superseded")]


def trained(run: Path) -> int:
    """Batches trained in the lineage."""
    return sum("rollout/success" in line for line in lines(run))


def in_cold_start(run: Path) -> bool:
    return (run / "model" / "config.json").exists() and not (run / "checkpoints" / "coldstart.json").exists()


def before_the_first_batch(run: Path) -> bool:
    return any("eval/success" in line for line in lines(run))


def between_update_and_checkpoint(behind: int) -> Moment:
    return lambda run: trained(run) == saved(run) + behind


def while_saving(run: Path) -> bool:
    return any((run / "checkpoints").glob(".*version-*"))


def after_checkpoint(version: int) -> Moment:
    return lambda run: saved(run) >= version


ENDS: list[tuple[Moment, How]] = [
    (in_cold_start, "SIGTERM"),
    (between_update_and_checkpoint(1), "SIGINT"),
    (while_saving, "SIGKILL"),
    (after_checkpoint(EVERY), "exception"),
]
KILLS: list[tuple[Moment, How]] = [
    (in_cold_start, "SIGKILL"),
    (before_the_first_batch, "SIGKILL"),
    (between_update_and_checkpoint(1), "SIGKILL"),
    (while_saving, "SIGKILL"),
    (after_checkpoint(EVERY), "SIGKILL"),
    (between_update_and_checkpoint(2), "SIGKILL"),
    (after_checkpoint(2 * EVERY), "SIGKILL"),
    (between_update_and_checkpoint(1), "SIGKILL"),
    (between_update_and_checkpoint(2), "SIGKILL"),
    (between_update_and_checkpoint(1), "SIGTERM"),
    (after_checkpoint(5 * EVERY), "SIGKILL"),  # the last
]


class Run:
    """One run folder and the processes that work on it, one after another."""

    def __init__(self, folder: Path, versions: int) -> None:
        self.path, self._folder, self._versions = folder / "run", folder, versions
        self._mark = f"resume-{os.getpid()}-{folder.name}"
        self._log, self._fault = folder / "log.txt", folder / "fault"
        self._listening = listening()

    def begin(self) -> subprocess.Popen[bytes]:
        resume = ["train", "--resume", str(self.path)]
        first = ["train", *CONFIG, f"runtime.versions={self._versions}", f"track.dir={self._folder}"]
        return start(resume if self.path.exists() else first, self._mark, self._log, ASYNCRL_TEST_FAULT=self._fault)

    def interrupt(self, moment: Moment, how: How) -> None:
        """Start or go on, end the driver at ``moment``, and see that nothing of it is left."""
        process = self.begin()
        end = time.monotonic() + 400
        # A kill may come just after the save it was meant for: the next start finds its moment there before its actors.
        while not (moment(self.path) and len(survivors(self._mark)) > 5):
            assert process.poll() is None, self.tail()
            assert time.monotonic() < end, f"not reached, or the mark does not reach the actors:\n{self.tail()}"
            time.sleep(0.05)
        if how == "exception":
            self._fault.touch()
        else:
            process.send_signal(signal.Signals[how])
        self.ended(process, CODES[how])
        if how != "SIGKILL":
            assert list((self.path / "checkpoints").glob(".*")) == []
            assert "Traceback" not in self._log.read_text()
        if how == "exception":
            self._fault.unlink()
            assert "planted in the learner" in self._log.read_text()
            assert f"asyncrl train --resume {self.path}" in self._log.read_text()

    def finish(self) -> None:
        self.ended(self.begin(), 0, timeout_s=600)

    def ended(self, process: subprocess.Popen[bytes], code: int, timeout_s: float = 90) -> None:
        try:
            assert process.wait(timeout_s) == code, self.tail()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        assert wait_for_no_survivor(self._mark) == []
        end = time.monotonic() + 60  # Ray's agents carry no mark, and look every few seconds whether their raylet lives
        while (left := listening() - self._listening) and time.monotonic() < end:
            time.sleep(0.5)
        assert left == set()

    def tail(self) -> str:
        return self._log.read_text()[-4000:]


def listening() -> set[tuple[str, int]]:
    """Local addresses of listening sockets."""
    return {tuple(c.laddr) for c in psutil.net_connections("inet") if c.status == psutil.CONN_LISTEN}


def check_exactly_once(run: Path, versions: int) -> None:
    """The ledger of the final checkpoint against everything that can be counted apart from it."""
    final = checkpoints(run)[-1]
    state = json.loads((final / "run" / "run.json").read_text())["state"]
    ledger = [*state["ledger"]["entries"].values()]
    config = load(run / "config.yaml")
    assert saved(run) == versions
    assert not state["again"] and not state["ready"]
    assert sorted(entry["position"] for entry in ledger) == list(range(GROUPS * versions))
    assert {entry["outcome"] for entry in ledger} == {"trained"}
    # An uninterrupted run takes the sampler's tasks in order, each once.
    ids = find_env(config.env.name).env_class().tasks(config.env.train_split)
    sampler = TaskSampler(config.env.name, ids, config.runtime.seed)
    assert {entry["position"]: entry["task"] for entry in ledger} == {
        position: sampler.task(position).id for position in range(GROUPS * versions)
    }
    learner = json.loads((final / "state" / "learner.json").read_text())
    assert learner["updates"] == state["update"]
    assert learner["rows"] == sum(entry["rows"] for entry in ledger)
    records = list(read(run / "trees.jsonl"))
    assert sorted((r["key"], len(r["nodes"]), r["version"]) for r in records) == sorted(
        (entry["key"], entry["rows"], entry["version"]) for entry in ledger
    )
    counted = recount(records)
    assert counted.repeated_keys == 0 and counted.problems == []
    summary = json.loads((run / "summary.json").read_text())
    assert summary["groups"] == GROUPS * versions
    assert summary["turn_samples"] == learner["rows"]
    assert summary["lag_max"] <= config.runtime.max_lag
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(steps[0], steps[0] + len(steps)))
    assert [line["version"] for line in lines(run) if "rollout/success" in line] == list(range(1, versions + 1))


@torch.no_grad()
def check_loads_with_equal_logits(checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, local_files_only=True).eval()
    ids = tuple(range(4, 100))
    logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)[:-1]
    expected = logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    with running_generator(checkpoint, max_model_len=256) as generator:
        served = ray.get(generator.score.remote(ids, 1), timeout=60)
    assert torch.allclose(torch.tensor(served), expected, atol=1e-4)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("versions", "ends"),
    [pytest.param(2 * EVERY, ENDS, id="signals"), pytest.param(5 * EVERY, KILLS, marks=pytest.mark.slow, id="kills")],
)
def test_a_run_goes_on_whatever_ended_it(
    versions: int, ends: list[tuple[Moment, How]], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    run = Run(tmp_path, versions)
    for moment, how in ends:
        run.interrupt(moment, how)
    run.finish()
    check_exactly_once(run.path, versions)
    request.getfixturevalue("ray_cluster")  # only now: its sockets would be taken for the run's
    check_loads_with_equal_logits(checkpoints(run.path)[-1])


def test_the_survivor_check_sees_what_lives() -> None:
    mark = f"alive-{os.getpid()}"
    child = subprocess.Popen(["sleep", "30"], env=os.environ | {"ASYNCRL_TEST_RUN": mark})
    try:
        assert len(survivors(mark)) == 1
    finally:
        child.kill()
        child.wait()
    assert wait_for_no_survivor(mark) == []
