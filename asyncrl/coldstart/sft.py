"""The supervised cold start of a run: expert trajectories, rows, cross-entropy on their responses, a model folder.

Invariants: the order of the rows is a function of the seed alone; every epoch sees every row once.
"""

import logging
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl.coldstart.rows import expert_rows
from asyncrl.config.coldstart import SftConfig
from asyncrl.config.run import RunConfig
from asyncrl.learner.group import LearnerGroup
from asyncrl.model.load import load_tokenizer
from asyncrl.track.aside import placing
from asyncrl.track.base import Tracker
from asyncrl.types import Row

log = logging.getLogger(__name__)

WARMUP_STEPS = 20
REPORT_EVERY = 20
"""Optimizer steps between two records of the cold start."""


async def cold_start(config: RunConfig, sft: SftConfig, model_path: str, out: Path, tracker: Tracker) -> dict[str, Any]:
    """Train ``model_path`` on expert rows and write the result to ``out``; returns the summary's keys of this phase.

    A cluster must be connected (:func:`asyncrl.runtime.system.cluster`).
    """
    started = time.monotonic()
    rows = expert_rows(config.env.spec, config.env.train_split, load_tokenizer(model_path), config.prompt, sft)
    log.info("cold start: %d rows from %d expert trajectories", len(rows), sft.trajectories)
    changes: dict[str, Any] = {"lr": sft.lr, "warmup_updates": 0}
    if not config.learner.gpus and not config.learner.threads and "RAY_ADDRESS" not in os.environ:
        # No engine runs beside it yet, on this machine of the run's own.
        changes["threads"] = max(1, len(os.sched_getaffinity(0)) // config.learner.world_size)
    learner = config.learner.model_copy(update=changes)
    group = LearnerGroup.create(model_path, learner, algo=None, dtype=config.model.dtype, seed=sft.seed)
    try:
        await group.start()
        steps = await train_sft(group, rows, sft, tracker)
        async with placing(out) as partial:
            await group.save(str(partial))
    finally:
        await group.shutdown()
    return {"sft_rows": len(rows), "sft_steps": steps, "seconds": time.monotonic() - started}


async def train_sft(group: LearnerGroup, rows: Sequence[Row], config: SftConfig, tracker: Tracker) -> int:
    """Train ``group`` on one or more rows for ``config.epochs`` epochs of shuffled batches.

    Figures are ``sft/loss``, ``sft/step``, ``sft/epoch`` (epochs done so far, e.g. 1.5) and the others of
    :func:`asyncrl.learner.report.merge`.

    Returns the number of optimizer steps.
    """
    order, rng = list(rows), random.Random(config.seed)
    per_epoch = -(-len(rows) // config.batch_rows)
    total, step = per_epoch * config.epochs, 0
    for _ in range(config.epochs):
        rng.shuffle(order)
        for start in range(0, len(order), config.batch_rows):
            # Warm-up, then linear decay to nothing.
            lr = config.lr * min(1.0, (step + 1) / WARMUP_STEPS) * (1 - step / total)
            figures = await group.sft_step(order[start : start + config.batch_rows], lr)
            step += 1
            figures |= {"step": step, "epoch": step / per_epoch}
            if step % REPORT_EVERY == 0:
                tracker.log(0, {f"sft/{name}": value for name, value in figures.items()})
    return step
