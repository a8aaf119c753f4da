"""Weights & Biases, offline unless the user is logged in.

Invariants: nothing here asks a question or waits longer than ``INIT_TIMEOUT_S``; with ``auto`` a server that does not
answer means an offline run, never a failed one; a run folder is one W&B run, however often it is resumed.
"""

import logging
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import wandb
from requests.utils import get_netrc_auth

from asyncrl.track.aside import write_atomic
from asyncrl.track.base import Histograms, Metrics

logger = logging.getLogger(__name__)

Mode = Literal["online", "offline", "disabled"]

INIT_TIMEOUT_S = 30.0
"""Longest wait for the server when a run starts online."""

ID_FILE = "wandb-id"
"""Of the run folder: the id under which W&B knows the run."""

OVER_STEP = ("sft/",)
"""Metrics drawn over the step: all of their records are of version 0. The others are drawn over the version."""


def logged_in() -> bool:
    """Whether W&B finds an API key without asking: in the environment, or where ``wandb login`` leaves it."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    return get_netrc_auth(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")) is not None


def resolve_mode(mode: str) -> Mode:
    """What ``track.wandb`` comes to here: ``auto`` follows WANDB_MODE where that is set, else the login."""
    asked = os.environ.get("WANDB_MODE", "") if mode == "auto" else mode
    if asked in ("online", "offline", "disabled"):
        return asked  # type: ignore[return-value]
    return "online" if logged_in() else "offline"


class WandbSink:
    def __init__(self, mode: str, project: str, name: str, folder: Path, config: Mapping[str, Any]) -> None:
        """Start a run whose files lie under ``folder``.

        Raises:
            wandb.Error: the run cannot start, and ``mode`` is not ``auto``.
        """
        resolved = resolve_mode(mode)
        if not (folder / ID_FILE).exists():
            write_atomic(folder / ID_FILE, secrets.token_hex(4))
        self._seen: set[str] = set()
        try:
            self._run = _init(resolved, project, name, folder, config)
        except Exception as error:
            if mode != "auto" or resolved != "online":
                raise
            logger.warning("W&B does not answer (%s); this run is recorded offline", error)
            self._run = _init("offline", project, name, folder, config)

    def log(self, step: int, version: int, metrics: Metrics, histograms: Histograms) -> None:
        record: dict[str, Any] = dict(metrics)
        for name, values in histograms.items():
            if len(values):
                record[name] = wandb.Histogram(np.asarray(values, dtype=np.float64))  # type: ignore[arg-type]
        # By name, because of two patterns that fit a name W&B may take either.
        for name in record.keys() - self._seen:
            if not name.startswith(OVER_STEP):
                self._run.define_metric(name, step_metric="version")
        self._seen |= record.keys()
        self._run.log({"version": version, **record}, step=step)

    def close(self) -> None:
        self._run.finish()


def _init(mode: Mode, project: str, name: str, folder: Path, config: Mapping[str, Any]) -> wandb.Run:
    return wandb.init(
        project=project,
        name=name,
        id=(folder / ID_FILE).read_text(encoding="utf-8"),
        resume="allow",
        dir=str(folder),
        mode=mode,
        config=dict(config),
        settings=wandb.Settings(init_timeout=INIT_TIMEOUT_S, console="off", silent=True, disable_git=True),
    )
