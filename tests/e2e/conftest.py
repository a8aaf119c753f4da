"""Whole runs from the command line, in processes of their own."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[2]
ASYNCRL = [str(Path(sys.executable).with_name("asyncrl"))]


@dataclass(frozen=True)
class Run:
    folder: Path
    summary: dict[str, Any]


def environment(mark: str) -> dict[str, str]:
    """The tests' environment with a mark that every descendant inherits, however it was started."""
    others = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}  # of a run in this process
    return others | {"ASYNCRL_TEST_RUN": mark, "WANDB_MODE": "offline"}


def survivors(mark: str) -> list[str]:
    """Living processes that carry the mark of a run."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        try:
            if process.environ().get("ASYNCRL_TEST_RUN") == mark and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid}: {' '.join(process.info['cmdline'] or [])[:200]}")
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def wait_for_no_survivor(mark: str, seconds: float = 20) -> list[str]:
    end = time.monotonic() + seconds
    while (left := survivors(mark)) and time.monotonic() < end:
        time.sleep(0.5)
    return left


FAULTS = Path(__file__).with_name("faults")


def start(arguments: list[str], mark: str, log: Path, **variables: object) -> subprocess.Popen[bytes]:
    """``asyncrl`` with ``arguments``; ``variables`` are environment variables that :data:`FAULTS` reads."""
    env = environment(mark) | {name: str(value) for name, value in variables.items()}
    if variables:
        env["PYTHONPATH"] = str(FAULTS)
    with log.open("wb") as file:
        return subprocess.Popen(
            [*ASYNCRL, *arguments], cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_interruptible,
        )  # fmt: skip


def _interruptible() -> None:
    # A shell starts its background jobs with SIGINT ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def finish(arguments: list[str], folder: Path, timeout_s: float) -> Run:
    """Run to the end; the summary of the one run folder under ``folder``."""
    mark, log = folder.name, folder / "log.txt"
    process = start([*arguments, f"track.dir={folder}"], mark, log)
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"not done after {timeout_s} s:\n{log.read_text()[-4000:]}")
    assert code == 0, log.read_text()[-4000:]
    assert wait_for_no_survivor(mark) == []
    (summary,) = folder.glob("*/summary.json")
    return Run(summary.parent, json.loads(summary.read_text()))
