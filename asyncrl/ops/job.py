"""A whole training run: model, cold start, reinforcement learning, summary.

Invariants: everything that can be refused is refused before an actor starts; the run folder holds a summary only when
the run came to its end; Ctrl-C and SIGTERM end everything that was started.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

from asyncrl.coldstart.run import cold_start
from asyncrl.coldstart.texts import environment_texts
from asyncrl.config.load import dump
from asyncrl.config.run import RunConfig
from asyncrl.env import find_env
from asyncrl.model.tiny import make_tiny
from asyncrl.ops.preflight import preflight
from asyncrl.runtime.system import cluster
from asyncrl.runtime.train import train
from asyncrl.track.base import Tracker
from asyncrl.track.open import open_tracker
from asyncrl.track.rundir import RunDir

log = logging.getLogger(__name__)

HEADLINE = (
    "eval/success",
    "rollout/success",
    "rollout/valid_turns",
    "rollout/explore_rate",
    "rollout/leaves",
    "lag/mean",
    "lag/max",
    "learner/kl_reference",
    "learner/clipped",
    "publish/logprob_gap",
    "time/wait_s",
    "time/train_s",
    "sft/loss",
)
"""What the terminal shows; the files hold everything."""


def run_job(config: RunConfig, *, replace: bool = False) -> tuple[RunDir, dict[str, Any]]:
    """Run ``config`` from start to summary.

    Args:
        replace: take exactly the folder ``track.name``, moving an older run of that name aside.

    Raises:
        ConfigError: the configuration cannot work here; nothing was started.
    """
    preflight(config)
    return asyncio.run(_job(config, replace))


async def _job(config: RunConfig, replace: bool) -> tuple[RunDir, dict[str, Any]]:
    started = time.monotonic()
    async with cluster(config):
        run = RunDir.create(config.track.dir, config.track.name, dump(config), replace=replace)
        log.info("run folder: %s", run.path)
        resolved = config.model_dump(mode="json")
        with open_tracker(config.track, run, resolved, config.runtime.versions, HEADLINE) as tracker:
            summary = await _phases(config, run, tracker)
    summary["seconds"]["total"] = time.monotonic() - started
    run.write_summary(summary)
    return run, summary


async def _phases(config: RunConfig, run: RunDir, tracker: Tracker) -> dict[str, Any]:
    seconds: dict[str, float] = {}
    extra: dict[str, Any] = {}
    model_path = config.model.path or str(make_model(config, run.path / "model"))
    if config.sft is not None:
        outcome = await cold_start(config, config.sft, model_path, run.checkpoints / "coldstart", tracker)
        seconds["sft"] = outcome.pop("seconds")
        extra |= outcome
        model_path = str(run.checkpoints / "coldstart")
    summary = await train(config, model_path, run, tracker)
    summary["seconds"] = seconds | summary["seconds"]
    return extra | summary


def make_model(config: RunConfig, out: Path) -> Path:
    """A tiny model whose tokenizer is trained on what its environment says."""
    spec = find_env(config.env.name, config.env.options)
    texts = environment_texts(spec, config.env.train_split, config.prompt, config.model.tiny.tasks)
    return make_tiny(out, config.model.tiny, texts, config.runtime.seed)
