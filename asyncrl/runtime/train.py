"""One reinforcement-learning run on a model folder: evaluate, loop, checkpoint, evaluate.

Invariants: the test split is measured by the weights in the generators, before the first and after the last batch; the
last version is always checkpointed.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import ray

from asyncrl.config.run import RunConfig
from asyncrl.env import find_env
from asyncrl.evaluate.episodes import EvalReport, evaluate
from asyncrl.learner.group import LearnerGroup
from asyncrl.rollout.waits import bounded
from asyncrl.runtime.checkpoints import Checkpoints
from asyncrl.runtime.loop import Loop, Totals
from asyncrl.runtime.recorder import Recorder
from asyncrl.runtime.sampler import TaskSampler
from asyncrl.runtime.system import System, system
from asyncrl.track.base import Tracker
from asyncrl.track.rundir import RunDir
from asyncrl.types import Task

log = logging.getLogger(__name__)

RECORD_TIMEOUT_S = 120


async def train(config: RunConfig, model_path: str, run_dir: RunDir, tracker: Tracker) -> dict[str, Any]:
    """Train the model of ``model_path``; returns the summary's keys of this phase.

    A cluster must be connected (:func:`asyncrl.runtime.system.cluster`).
    """
    env_class = find_env(config.env.name, config.env.options).env_class()
    sampler = TaskSampler(config.env.name, env_class.tasks(config.env.train_split), config.runtime.seed)
    seconds: dict[str, float] = {}
    started = time.monotonic()
    async with system(config, model_path) as parts:
        seconds["start"] = time.monotonic() - started
        recorder: Any = ray.remote(Recorder).options(num_cpus=0).remote(str(run_dir.trees))
        checkpoints = Checkpoints(run_dir.checkpoints, config.runtime.keep_checkpoints)
        learner = cast(LearnerGroup, parts.learner)

        async def test(version: int) -> EvalReport:
            began = time.monotonic()
            outcome = await evaluate_split(config, parts)
            tracker.log(version, outcome.metrics())
            seconds["eval"] = seconds.get("eval", 0.0) + time.monotonic() - began
            return outcome

        async def record(version: int, update: int, records: Sequence[Any]) -> None:
            async with bounded(RECORD_TIMEOUT_S, "writing trees.jsonl"):
                await recorder.write.remote(version, update, *records)

        async def after_publish(version: int) -> None:
            last = version == config.runtime.versions
            if last or version % config.runtime.checkpoint_every == 0:
                await checkpoints.save(learner, version)
            if config.runtime.eval_every and version % config.runtime.eval_every == 0 and not last:
                await test(version)

        before = await test(0)
        began = time.monotonic()
        loop = Loop(config, parts, sampler, tracker, record, after_publish)
        totals = await loop.run()
        seconds["train"] = time.monotonic() - began
        after = await test(loop.version) if config.runtime.versions else before
        async with bounded(RECORD_TIMEOUT_S, "closing trees.jsonl"):
            await recorder.close.remote()
        engine = await parts.fleet.stats()
    return _summary(before, after, loop, totals, engine, seconds)


async def evaluate_split(config: RunConfig, parts: System) -> EvalReport:
    """The test split, in its fixed order, by the weights now in the generators."""
    env_class = find_env(config.env.name, config.env.options).env_class()
    ids = env_class.tasks(config.env.test_split)[: config.eval.tasks]
    tasks = [Task(config.env.name, id, config.runtime.seed) for id in ids]
    at_once = config.env.workers * config.env.slots_per_worker
    return await evaluate(parts.coordinators, tasks, at_once, config.eval.episodes, _every_fifth)


def _every_fifth(done: int, total: int) -> None:
    if done * 5 // total > (done - 1) * 5 // total:
        log.info("evaluation: %d of %d episodes", done, total)


def _summary(
    before: EvalReport,
    after: EvalReport,
    loop: Loop,
    totals: Totals,
    engine: dict[str, float],
    seconds: dict[str, float],
) -> dict[str, Any]:
    turns = sum(totals.lags.values())
    counters: Counter[str] = totals.counters
    return {
        "success_coldstart": before.success,
        "success_coldstart_interval": [before.success_low, before.success_high],
        "success_final": after.success,
        "success_final_interval": [after.success_low, after.success_high],
        "valid_turns_coldstart": before.valid_turns,
        "valid_turns_final": after.valid_turns,
        "eval_episodes": after.episodes,
        "updates": loop.update,
        "versions": loop.version,
        "groups": totals.groups,
        "groups_lost": totals.lost,
        "tasks_dropped": totals.dropped,
        "turn_samples": totals.turn_samples,
        "tokens_generated": totals.tokens_generated,
        "lag_mean": sum(lag * count for lag, count in totals.lags.items()) / turns if turns else 0.0,
        "lag_max": max(totals.lags, default=0),
        "leaves_max": totals.leaves_max,
        "branched_turn_share": totals.branched_turns / turns if turns else 0.0,
        "branches_verified": counters["branches_verified"],
        "branch_restore_ms_mean": counters["branch_restore_ms"] / max(1, counters["branches_verified"]),
        "replayed_steps": counters["replayed_steps"],
        "replay_mismatches": counters["replay_mismatches"],
        "digests_checked": totals.digests_checked,
        "digest_mismatches": totals.digest_mismatches,
        "publish_logprob_gap_max": totals.logprob_gap_max,
        "engine": engine,
        "seconds": seconds,
    }
