"""Everything that runs beside the driver: started together, ended together.

Invariants: nothing is started before the whole layout is known to fit the cluster; whatever was started is ended on
every way out, in the order learner, coordinators, generators, environment workers, Ray; each end has a time limit.
"""

import asyncio
import logging
import math
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import ray

from asyncrl.config.env import EnvConfig
from asyncrl.config.load import ConfigError
from asyncrl.config.run import RunConfig
from asyncrl.engine.fleet import CONCURRENCY, Fleet
from asyncrl.engine.waits import bounded
from asyncrl.env import EnvSpec
from asyncrl.learner.group import LearnerGroup
from asyncrl.rollout.coordinator import Coordinator
from asyncrl.rollout.coordinators import Coordinators
from asyncrl.rollout.pool import WORKER_CPUS, EnvPool

log = logging.getLogger(__name__)

END_TIMEOUT_S = 30

ACTOR_ENV = {
    # Models are local folders: a loader that asks a hub would only stall.
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # What libraries say while they load would bury the run's own lines.
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
    "PYTHONWARNINGS": os.environ.get("PYTHONWARNINGS", "ignore"),
}
"""The environment of every actor's process."""

UNWATCHED = {"task_events_report_interval_ms": 0, "enable_metrics_collection": False, "event_stats": False}
"""A cluster that lives for one run has no dashboard to report to: Ray need not record every actor call."""


@dataclass(frozen=True, slots=True)
class System:
    fleet: Fleet
    pool: Any
    """Handle of the :class:`EnvPool`."""
    coordinators: Coordinators
    learner: LearnerGroup | None


@asynccontextmanager
async def cluster(config: RunConfig) -> AsyncIterator[None]:
    """Connect to the cluster of ``RAY_ADDRESS``, or start a local one for the length of the run."""
    given = os.environ.get("RAY_ADDRESS")
    options: dict[str, Any] = {"address": given}
    if not given:
        options = {
            "address": "local",
            "include_dashboard": False,
            "num_cpus": max(os.cpu_count() or 1, math.ceil(cpus_wanted(config))),
            "_system_config": UNWATCHED,
        }
    if not sys.stdout.isatty():
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")  # of the lines that it passes on from actors
    ray.init(runtime_env={"env_vars": ACTOR_ENV}, logging_level=logging.ERROR, log_to_driver=True, **options)
    cancel_on(signal.SIGTERM)  # Ray has just put a handler of its own there, which would skip the ways out below
    try:
        refuse_what_does_not_fit(config, ray.cluster_resources())
        yield
    finally:
        ray.shutdown()


def cancel_on(number: int) -> None:
    """Make a signal cancel the current task, once, so that everything started is ended on the way out."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()

    def cancel() -> None:
        loop.add_signal_handler(number, lambda: None)  # a second one must not cut the clean-up short
        if task is not None:
            task.cancel()

    loop.add_signal_handler(number, cancel)


def cpus_wanted(config: RunConfig) -> float:
    return (
        config.engine.generators * config.engine.cpus
        + config.learner.world_size * config.learner.cpus
        + config.env.workers * WORKER_CPUS
    )


def refuse_what_does_not_fit(config: RunConfig, resources: dict[str, float]) -> None:
    """Raises ConfigError naming what the layout wants and the cluster lacks, instead of pending for ever."""
    gpus = config.engine.generators * config.engine.gpus + config.learner.world_size * config.learner.gpus
    for name, wanted in (("CPU", cpus_wanted(config)), ("GPU", gpus)):
        have = resources.get(name, 0.0)
        if wanted > have:
            raise ConfigError(
                f"the layout wants {wanted:g} {name}s but the cluster has {have:g}: lower engine.generators, "
                f"learner.world_size or their {name.lower()}s, or add nodes"
            )


def slot_spec(env: EnvConfig) -> EnvSpec:
    """What the slots hold: the configured environment, slowed down where latency is asked for."""
    if env.latency is None:
        return env.spec
    return EnvSpec(env.name, "envs.delayed:Delayed", {"inner": env.spec, **env.latency.model_dump()})


@asynccontextmanager
async def system(config: RunConfig, model_path: str, learner: bool = True) -> AsyncIterator[System]:
    """Start generators, environment workers, coordinators and (for training) the learner group on ``model_path``."""
    async with AsyncExitStack() as ends:
        actor: Any = ray.remote(EnvPool).options(num_cpus=0, max_concurrency=CONCURRENCY)
        pool = actor.remote(slot_spec(config.env), config.env.workers, config.env.slots_per_worker)
        ends.callback(ray.kill, pool)
        ends.push_async_callback(_end, "environment pool", pool.close.remote)
        fleet = Fleet.create(config.engine, model_path, config.model.dtype, config.runtime.seed, config.thinking)
        ends.push_async_callback(_end, "generators", fleet.shutdown)
        actor = ray.remote(Coordinator).options(num_cpus=0, max_concurrency=CONCURRENCY)
        names = [f"coordinator-{i}" for i in range(config.runtime.coordinators)]
        handles = {name: actor.remote(name, config, model_path, fleet.handles, pool) for name in names}
        ends.callback(lambda: [ray.kill(handle) for handle in handles.values()])
        group: LearnerGroup | None = None
        if learner:
            group = LearnerGroup.create(
                model_path,
                config.learner,
                algo=config.algo,
                dtype=config.model.dtype,
                temperature=config.sampling.temperature,
                seed=config.runtime.seed,
            )
            ends.push_async_callback(_end, "learner group", group.shutdown)
        async with asyncio.TaskGroup() as started:
            started.create_task(_ready([pool, *handles.values()], config.engine.start_timeout_s))
            engines = started.create_task(fleet.start())
            if 0 < config.engine.gpus < 1:
                await engines  # alone on a shared GPU: an engine measures what memory is free
            if group is not None:
                started.create_task(group.start())
        if group is not None:
            await group.connect(fleet.handles, config.engine.publish_timeout_s)
        yield System(fleet, pool, Coordinators(handles, pool, config.runtime.group_timeout_s), group)


async def _ready(actors: list[Any], timeout_s: float) -> None:
    async with bounded(timeout_s, "starting coordinators and env workers", "engine.start_timeout_s"):
        await asyncio.gather(*(actor.ready.remote() for actor in actors))


async def _end(what: str, end: Callable[[], Awaitable[None]]) -> None:
    try:
        async with asyncio.timeout(END_TIMEOUT_S):
            await end()
    except Exception as error:  # the rest must still be ended
        log.warning("%s did not end cleanly: %r", what, error)
