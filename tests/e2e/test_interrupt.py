"""Ctrl-C and SIGTERM in the middle of a run: nothing of ours lives on, and the last checkpoint is whole."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.e2e.conftest import start, survivors, wait_for_no_survivor

ENDLESS = [
    "quickstart", "sft.trajectories=40", "sft.epochs=1", "eval.tasks=8", "runtime.versions=100000",
    "runtime.groups_per_batch=4", "runtime.checkpoint_every=1", "runtime.eval_every=0",
]  # fmt: skip


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_everything(number: int, code: int, tmp_path: Path) -> None:
    mark, log = f"interrupt-{number}-{os.getpid()}", tmp_path / "log.txt"
    process = start([*ENDLESS, f"track.dir={tmp_path}"], mark, log)
    checkpoints = tmp_path / "quickstart" / "checkpoints"
    try:
        end = time.monotonic() + 400
        while not list(checkpoints.glob("version-*")):
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < end, log.read_text()[-4000:]
            time.sleep(1)
        time.sleep(3)
        assert len(survivors(mark)) > 5, "the mark does not reach the actors: this test would see nothing"
        process.send_signal(number)
        assert process.wait(60) == code, log.read_text()[-4000:]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert wait_for_no_survivor(mark) == []
    assert "Traceback" not in log.read_text()
    last = sorted(checkpoints.glob("version-*"))[-1]
    AutoModelForCausalLM.from_pretrained(last, local_files_only=True)
    assert [path.name for path in checkpoints.iterdir() if "partial" in path.name] == []


def test_the_survivor_check_sees_what_lives(tmp_path: Path) -> None:
    mark = f"alive-{os.getpid()}"
    child = subprocess.Popen(["sleep", "30"], env=os.environ | {"ASYNCRL_TEST_RUN": mark})
    try:
        assert len(survivors(mark)) == 1
    finally:
        child.kill()
        child.wait()
    assert wait_for_no_survivor(mark) == []
