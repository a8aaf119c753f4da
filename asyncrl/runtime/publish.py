"""Handing new weights to every generator that lives.

Invariants: generation is paused with its requests kept, and it runs again after every publish, a failed one included;
a generator is labelled with the version only once it holds all of the weights, and serves only under the version of the
last publish: who missed it is fenced, and refitted by the next; every wait has a bound.
"""

import logging
import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from asyncrl.engine.fleet import Fleet
from asyncrl.engine.waits import now
from asyncrl.learner.group import LearnerGroup

log = logging.getLogger(__name__)


async def publish(
    fleet: Fleet, learner: LearnerGroup, version: int, members: Sequence[int] | None = None
) -> dict[str, float]:
    """Pause, transfer, label, resume. Returns seconds a phase, and how many generators serve the version or are fenced.

    ``members``: indices of the generators to serve; all that live where none are given.

    Raises:
        RuntimeError: no generator holds the new weights.
        GeneratorDied: none is left.
    """
    times = [now()]
    try:
        paused = await fleet.pause(members)
        times.append(now())
        holding, failed = await _transfer(fleet, learner, version, paused)
        if not holding and (others := [at for at in await fleet.pause(paused) if failed.get(at) == ""]):
            # Over NCCL one that fails ends the transfer for all: once more, without it.
            holding, again = await _transfer(fleet, learner, version, others)
            failed |= again
        if not holding:
            raise RuntimeError(f"publish: no generator holds version {version}: {failed or 'none could be paused'}")
        times.append(now())
    finally:
        await fleet.resume(members)  # who missed the pause too: it must not go on with older weights
    times.append(now())
    phases = zip(("pause", "transfer", "resume"), pairwise(times), strict=True)
    counts = {"publish/generators": len(fleet.living()) - len(fleet.fenced), "publish/fenced": len(fleet.fenced)}
    return {f"publish/{name}_s": end - start for name, (start, end) in phases} | counts


async def _transfer(
    fleet: Fleet, learner: LearnerGroup, version: int, members: Sequence[int]
) -> tuple[list[int], dict[int, str]]:
    """One round; returns the indices that hold the version now, and why others of ``members`` do not."""
    failed = await learner.send_weights(members) if members else {}
    for at, why in failed.items():
        log.warning("generator-%d missed version %d: %s", at, version, why or "the transfer ended for all")
    return await fleet.update_weight_version(version, [at for at in members if at not in failed]), failed


def logprob_gap(ours: Sequence[Sequence[float]], theirs: Iterable[Sequence[Sequence[float]]]) -> dict[str, float]:
    """How far the log-probs of learner and engines differ over the response tokens of some probes.

    Equal checksums don't prove a publish (a re-packed output head can keep old weights); equal log-probs do.

    Args:
        ours: [probes][tokens], the learner's.
        theirs: [generators][probes][tokens].

    Returns the largest difference, and the mean divergence of the learner from the engine (k3, in nats a token).
    """
    gaps = [
        a - b
        for served in theirs
        for one, other in zip(ours, served, strict=True)
        for a, b in zip(one, other, strict=True)
    ]
    return {
        "publish/logprob_gap": max(map(abs, gaps), default=0.0),
        "publish/kl_mismatch": sum(math.expm1(gap) - gap for gap in gaps) / max(1, len(gaps)),
    }
