"""Commands as processes of their own, and tables of what they came to.

Invariants: one runs at a time, so none has more of the machine than another; a run whose summary is already in the
folder is taken as it is, so an interrupted measurement goes on where it stopped; interrupting it ends the run too.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

END_TIMEOUT_S = 120.0
"""What a run may take to end everything it started."""


def train_once(config: Path, out: Path, name: str, overrides: Sequence[str]) -> dict[str, Any]:
    """The summary of one training run in ``out/name``. Raises RuntimeError where it fails."""
    summary = out / name / "summary.json"
    if not summary.exists():
        shutil.rmtree(out / name, ignore_errors=True)  # of a run that was stopped: a new one would get another name
        command(out / f"{name}.log", "train", str(config), *overrides, f"track.dir={out}", f"track.name={name}")
    return json.loads(summary.read_text(encoding="utf-8"))


def command(log: Path, *arguments: str) -> None:
    """Run ``asyncrl`` with ``arguments``, its output in ``log``. Raises RuntimeError where it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    line = [sys.executable, "-m", "asyncrl.cli", *arguments]
    # A session of its own: the terminal's Ctrl-C reaches it once, as our SIGTERM, and its clean-up is not cut short.
    with log.open("w") as to:
        run = subprocess.Popen(line, stdout=to, stderr=to, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        code = run.wait()
    except BaseException:
        run.terminate()
        run.wait(END_TIMEOUT_S)
        raise
    if code:
        raise RuntimeError(f"asyncrl {arguments[0]} failed with exit code {code}: see {log}")


def markdown(header: str, rows: Iterable[Iterable[str]]) -> str:
    """``header`` as ``a | b | c``, then the rows."""
    lines = [header, "|".join(["---"] * len(header.split("|"))), *(" | ".join(row) for row in rows)]
    return "".join(f"| {line} |\n" for line in lines)
