"""One reinforcement-learning run on a model folder: evaluate, loop, checkpoint, evaluate.

Invariants: the test split is measured by the weights in the generators, before the first and after the last batch; the
last version is always checkpointed; a resumed run goes on from its newest checkpoint as if nothing had come after it.
"""

import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import ray

from asyncrl.config.run import RunConfig
from asyncrl.engine.waits import bounded, now
from asyncrl.evaluate.episodes import EvalReport, evaluate
from asyncrl.learner.group import LearnerGroup
from asyncrl.rollout.pool import counted
from asyncrl.runtime.checkpoints import Checkpoints, read_facts, restore
from asyncrl.runtime.loop import Loop
from asyncrl.runtime.measure import profile, run_summary
from asyncrl.runtime.publish import publish
from asyncrl.runtime.recorder import Recorder
from asyncrl.runtime.sampler import TaskSampler
from asyncrl.runtime.state import RunState
from asyncrl.runtime.system import System, system
from asyncrl.track.base import Tracker
from asyncrl.track.rundir import RunDir
from asyncrl.types import Task

log = logging.getLogger(__name__)

RECORD_TIMEOUT_S = 120


async def train(
    config: RunConfig, model_path: str, run: RunDir, tracker: Tracker, resume: Path | None = None
) -> dict[str, Any]:
    """Train the model of ``model_path``; returns the summary's keys of this phase.

    A cluster must be connected (:func:`asyncrl.runtime.system.cluster`).

    ``resume``: a checkpoint of this run to go on from.
    """
    started = now()
    ids = config.env.spec.env_class().tasks(config.env.train_split)
    sampler = TaskSampler(config.env.name, ids, config.runtime.seed)
    checkpoints = Checkpoints(run.checkpoints, config.runtime.keep_checkpoints)
    log.info("starting engines, environments and learner")
    async with system(config, model_path) as parts:
        recorder: Any = ray.remote(Recorder).options(num_cpus=0).remote(str(run.trees))
        learner = cast(LearnerGroup, parts.learner)
        state = RunState()
        before: EvalReport | None = None
        if resume is not None:
            state = await restore(resume, recorder)
            before = EvalReport(**read_facts(resume)["before"])
            await learner.load_state(str(resume))
            await publish(parts.fleet, learner, state.version)
            log.info("resumed at version %d with %d groups ready", state.version, len(state.ready))
        state.seconds["start"] += now() - started

        async def test(version: int) -> EvalReport:
            began = now()
            outcome = await evaluate_split(config, parts)
            tracker.log(version, outcome.metrics())
            state.seconds["eval"] += now() - began
            return outcome

        async def record(version: int, update: int, records: Sequence[Any]) -> None:
            async with bounded(RECORD_TIMEOUT_S, "writing trees.jsonl"):
                await recorder.write.remote(version, update, *records)

        async def after_publish(version: int) -> None:
            last = version == config.runtime.versions
            if config.runtime.eval_every and version % config.runtime.eval_every == 0 and not last:
                await test(version)
            if last or version % config.runtime.checkpoint_every == 0:
                began = now()
                facts = {"before": asdict(first), "sizes": run.sizes()}
                await checkpoints.save(learner, recorder, state, facts)
                state.seconds["checkpoint"] += now() - began

        first = before or await test(0)
        began = await _counts(parts)
        await Loop(config, parts, sampler, tracker, state, record, after_publish).run()
        spent = {name: count - began.get(name, 0.0) for name, count in (await _counts(parts)).items()}
        after = await test(state.version) if config.runtime.versions else first
        async with bounded(RECORD_TIMEOUT_S, "closing trees.jsonl"):
            await recorder.close.remote()
    return run_summary(first, after, state, profile(state, spent, config.env.slots))


async def _counts(parts: System) -> dict[str, float]:
    """What generators and environments have counted so far, as far as they answer: a run does not end for a count."""
    return await parts.fleet.stats() | await counted(parts.pool)


async def evaluate_split(config: RunConfig, parts: System) -> EvalReport:
    """The test split, in its fixed order, by the weights now in the generators."""
    ids = config.env.spec.env_class().tasks(config.env.test_split)[: config.eval.tasks]
    tasks = [Task(config.env.name, id, config.runtime.seed) for id in ids]
    return await evaluate(parts.coordinators, tasks, config.env.slots, config.eval.episodes)
