"""Handing new weights to every generator.

Invariants: generation is paused with its requests kept, and it runs again after every publish, a failed one included;
the version is changed only after all generators hold the new weights; every wait has a bound.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from asyncrl.engine.fleet import Fleet
from asyncrl.learner.group import LearnerGroup


async def publish(fleet: Fleet, learner: LearnerGroup, version: int) -> dict[str, float]:
    """Pause, transfer, label, resume. Returns seconds a phase."""
    times = [time.monotonic()]
    try:
        await fleet.pause()
        times.append(time.monotonic())
        await learner.send_weights()
        await fleet.update_weight_version(version)
        times.append(time.monotonic())
    finally:
        await fleet.resume()
    times.append(time.monotonic())
    return {
        "publish/pause_s": times[1] - times[0],
        "publish/transfer_s": times[2] - times[1],
        "publish/resume_s": times[3] - times[2],
    }


async def check_publish(
    fleet: Fleet, learner: LearnerGroup, probes: Sequence[tuple[tuple[int, ...], int]]
) -> dict[str, float]:
    """Largest difference between engine and learner log-probs over the response tokens of ``probes``.

    Equal checksums don't prove a publish (a re-packed output head can keep old weights); equal log-probs do.
    """
    learned = await learner.logprobs(list(probes))
    worst = 0.0
    for served in await fleet.score_everywhere(list(probes)):
        for ours, theirs in zip(learned, served, strict=True):
            worst = max([worst, *(abs(a - b) for a, b in zip(ours, theirs, strict=True))])
    return {"publish/logprob_gap": worst}
