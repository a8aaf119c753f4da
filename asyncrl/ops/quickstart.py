"""The quickstart: a tiny model learns a household on a CPU, and draws its own learning curve."""

import logging
from contextlib import closing
from typing import Any

from asyncrl.config.run import RunConfig
from asyncrl.ops.job import run_job
from asyncrl.types import Task
from asyncrl.view.curve import draw, read_curve

log = logging.getLogger(__name__)


def quickstart(config: RunConfig) -> dict[str, Any]:
    """Run the quickstart's ``config``; adds ``curve.png`` to the folder and ``success_expert`` to the summary."""
    run, summary = run_job(config, replace=True)
    with closing(config.env.spec.make()) as env:
        ids = env.tasks(config.env.test_split)[: config.eval.tasks]
        solved = sum(env.expert(Task(config.env.name, id, config.runtime.seed)) is not None for id in ids)
    summary["success_expert"] = solved / len(ids)
    run.write_summary(summary)
    if config.runtime.versions:
        draw(
            {"quickstart": [read_curve(run.metrics)]},
            run.path / "curve.png",
            f"{config.env.name}: success against generated tokens",
            ("naive expert (held-out)", summary["success_expert"]),
        )
    shares = [100 * summary[f"success_{whose}"] for whose in ("coldstart", "final", "expert")]
    text = "held-out success %.1f %% after the cold start, %.1f %% at the end (naive expert %.1f %%); %s"
    log.info(text, *shares, run.path)
    return summary
