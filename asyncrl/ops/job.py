"""A whole training run: model, cold start, reinforcement learning, summary.

Invariants: callers have run the preflight, so that all that can be refused is refused before an actor starts; the run
folder holds a summary only when the run came to its end; Ctrl-C and SIGTERM end everything that was started.
"""

import asyncio
import json
import logging
import time
from operator import attrgetter
from pathlib import Path
from typing import Any

from asyncrl.coldstart.sft import cold_start
from asyncrl.coldstart.texts import environment_texts
from asyncrl.config.load import ConfigError, dump, load
from asyncrl.config.run import RunConfig
from asyncrl.model.tiny import make_tiny
from asyncrl.runtime.checkpoints import Checkpoints, read_facts
from asyncrl.runtime.system import cluster
from asyncrl.runtime.train import train
from asyncrl.track.aside import write_atomic
from asyncrl.track.base import Tracker
from asyncrl.track.jsonl import supersede
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
    "learner/entropy",
    "learner/clipped",
    "publish/logprob_gap",
    "time/wait_s",
    "time/update_s",
    "sft/epoch",
    "sft/loss",
)
"""What the terminal shows; the files hold everything."""
FIXED = (
    "env.name", "env.options", "env.train_split",
    "runtime.seed", "runtime.groups_per_batch", "runtime.mode", "runtime.max_lag", "runtime.late",
)  # fmt: skip
"""Fields that a resume may not change."""
COLD = "coldstart.json"
"""Written when the folder ``coldstart`` is complete: its part of the summary, and the sizes of the run's files then."""


def run_job(config: RunConfig, *, replace: bool = False, resume: RunDir | None = None) -> tuple[RunDir, dict[str, Any]]:
    """Run ``config`` from start to summary.

    Args:
        replace: take exactly the folder ``track.name``, moving an older run of that name aside.
        resume: the folder of a run to go on with, from its newest checkpoint, or from its start where it has none.

    Raises ConfigError: the cluster is too small, or it is other work that is to be resumed; nothing was started.
    """
    if resume is not None:
        _refuse_other_work(config, load(resume.config))
    return asyncio.run(_job(config, replace, resume))


def _refuse_other_work(config: RunConfig, before: RunConfig) -> None:
    """What decides which tasks come, and how late they may be trained, stays for the length of a run."""
    changed = [
        f"{path}: a resumed run keeps {kept!r}, got {given!r}"
        for path in FIXED
        if (given := attrgetter(path)(config)) != (kept := attrgetter(path)(before))
    ]
    if changed:
        raise ConfigError(changed)


async def _job(config: RunConfig, replace: bool, resume: RunDir | None) -> tuple[RunDir, dict[str, Any]]:
    started = time.monotonic()
    async with cluster(config):
        run = resume or RunDir.create(config.track.dir, config.track.name, dump(config), replace=replace)
        log.info("run folder: %s", run.path)
        with run.held():
            checkpoint = Checkpoints(run.checkpoints, config.runtime.keep_checkpoints).latest()
            if resume is not None:
                _begin_again(config, run, checkpoint)
            resolved = config.model_dump(mode="json")
            try:
                with open_tracker(config.track, run, resolved, config.runtime.versions, HEADLINE) as tracker:
                    summary = await _phases(config, run, tracker, checkpoint)
            except BaseException:
                log.info("to go on from the newest checkpoint: asyncrl train --resume %s", run.path)
                raise
            summary["seconds"]["total"] = time.monotonic() - started
            run.write_summary(summary)
    return run, summary


def _begin_again(config: RunConfig, run: RunDir, checkpoint: Path | None) -> None:
    """Mark what was written after the checkpoint, or else after the cold start, as superseded."""
    run.summary.unlink(missing_ok=True)
    write_atomic(run.config, dump(config))
    cold = run.checkpoints / COLD
    if checkpoint is not None:
        sizes = read_facts(checkpoint)["sizes"]
    else:
        sizes = json.loads(cold.read_text())["sizes"] if cold.exists() else {}
    for file in (run.metrics, run.trees):
        lines = supersede(file, sizes.get(file.name, 0))
        log.info("%s: %d lines written after %s are superseded", file.name, lines, checkpoint or "the cold start")


async def _phases(config: RunConfig, run: RunDir, tracker: Tracker, checkpoint: Path | None) -> dict[str, Any]:
    cold = run.checkpoints / COLD
    if config.sft is None:
        return await train(config, base_model(config, run.path / "model"), run, tracker, checkpoint)
    folder = cold.with_suffix("")
    if not cold.exists():
        outcome = await cold_start(config, config.sft, base_model(config, run.path / "model"), folder, tracker)
        write_atomic(cold, json.dumps({"sizes": run.sizes(), "summary": outcome}))
    outcome = json.loads(cold.read_text())["summary"]
    summary = await train(config, str(folder), run, tracker, checkpoint)
    return outcome | summary | {"seconds": {"sft": outcome["seconds"], **summary["seconds"]}}


def base_model(config: RunConfig, folder: Path) -> str:
    """The model that training starts from: ``model.path``, or else a new one in ``folder``."""
    return config.model.path or str(make_model(config, folder))


def make_model(config: RunConfig, out: Path) -> Path:
    """A tiny model whose tokenizer is trained on what its environment says."""
    texts = environment_texts(config.env.spec, config.env.train_split, config.prompt, config.model.tiny.tasks)
    return make_tiny(out, config.model.tiny, texts, config.runtime.seed)
