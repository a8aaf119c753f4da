"""One schedule, from its seed to what the checks say of it.

Invariants: production code runs unchanged, from ``runtime.train`` down; it is given a virtual clock, a miniature Ray,
and doubles of model, environment, credit and training; a run that ends before its time is resumed from its newest
checkpoint, as a user would; whatever happened, the schedule ends within a stated virtual time.
"""

import asyncio
import contextlib
import gc
import logging
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from asyncrl.algo.advantage import ADVANTAGES
from asyncrl.rollout import coordinator, slot
from asyncrl.runtime import train as production
from asyncrl.runtime.checkpoints import Checkpoints
from asyncrl.runtime.system import system
from asyncrl.track.base import Tracker
from asyncrl.track.rundir import RunDir
from tests.simulation import checks
from tests.simulation.chance import Death, Schedule, draw
from tests.simulation.clock import Deadlock, Livelock, Process, VirtualLoop, unregistered
from tests.simulation.doubles import (
    JOURNAL,
    Engine,
    Journal,
    Rank,
    Tokenizer,
    WatchedCoordinator,
    WatchedForest,
    no_credit,
)
from tests.simulation.rays import Actor, Cluster

MEMORY = Path("/dev/shm")
"""Where checkpoints are written, if there is such a place."""
RESTART_S = 1.0
ENV_METHODS = ("call",)
INSTANT = (
    *("release", "pause", "resume", "update_weight_version"),
    *("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"),
)
COMMON = "EnvWorker"
"""The kind that dies where the one drawn has too few left."""

Event = tuple[Any, ...]


@dataclass(slots=True)
class Outcome:
    """What a schedule came to."""

    seed: int
    violations: list[str]
    deaths: list[str]
    lives: int
    virtual_s: float
    tasks: int
    """Trained in the final checkpoint's lineage."""
    cpu_s: float = 0.0
    trace: list[Event] = field(default_factory=list)


def simulate(seed: int, tell: Callable[[str], None] | None = None, keep_trace: bool = False) -> Outcome:
    """Run the schedule of ``seed``.

    Args:
        tell: is given a line for every event.
        keep_trace: the outcome holds the events.
    """
    began = time.process_time()
    schedule = draw(seed)
    random.seed(seed)  # production code breaks ties with it
    loop = VirtualLoop()
    place = str(MEMORY) if MEMORY.is_dir() else None
    with contextlib.ExitStack() as ends:
        ends.enter_context(_without_collections())
        ends.enter_context(unregistered())
        ends.callback(loop.close)
        ends.enter_context(_quiet(tell, loop))
        folder = tempfile.TemporaryDirectory(prefix="asyncrl-simulation-", dir=place)
        ends.callback(folder.cleanup)
        world = World(schedule, loop, RunDir(Path(folder.name)), tell, keep_trace)
        ends.enter_context(world.installed())
        ends.callback(slot._BACKGROUND.clear)
        ends.callback(loop.bury)
        ends.callback(folder.cleanup)  # before the dead are buried, whose last words would touch it
        try:
            loop.run_until_complete(world.run())
        except (Deadlock, Livelock) as error:
            world.journal.violation(f"promise 6: {error}")
    outcome = world.outcome()
    outcome.cpu_s = time.process_time() - began
    return outcome


class World:
    def __init__(
        self, schedule: Schedule, loop: VirtualLoop, run: RunDir, tell: Callable[[str], None] | None, keep: bool
    ) -> None:
        self._schedule, self._loop, self._run = schedule, loop, run
        self._tell, self._keep = tell, keep
        self._trace: list[Event] = []
        rng = random.Random(f"world/{schedule.seed}")
        self.journal = Journal(schedule, rng)
        JOURNAL.set(self.journal)
        self._cluster = Cluster(
            loop,
            rng,
            self._duration,
            self._mishap,
            self._note if tell or keep else lambda *_: None,
            stand_ins={"Generator": Engine, "LearnerRank": Rank, "Coordinator": WatchedCoordinator},
            locked=(*ENV_METHODS, "settle"),
            instant=INSTANT,
        )
        self.journal.living = lambda: len(self._cluster.alive("Generator"))
        self._driver: Process | None = None
        self._gone: asyncio.Future[None] | None = None
        """Done when the driver of this life has been killed."""
        self._started = False
        self._struck: list[tuple[float, str]] = []
        """Deaths of this life."""
        self._deaths: list[str] = []
        self._lives = 0
        self._tasks = 0

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        self._run.checkpoints.mkdir()
        with (
            self._cluster.installed(),
            mock.patch.object(coordinator, "load_tokenizer", return_value=Tokenizer()),
            mock.patch.object(coordinator, "Forest", WatchedForest),
            mock.patch.dict(ADVANTAGES, dict.fromkeys(ADVANTAGES, no_credit)),
            mock.patch.object(production, "system", self._watched_system),
        ):
            yield

    def outcome(self) -> Outcome:
        return Outcome(
            self._schedule.seed,
            self.journal.violations,
            self._deaths,
            self._lives,
            self._loop.time(),
            self._tasks,
            trace=self._trace,
        )

    async def run(self) -> None:
        """Live until the run is complete or its promises are broken."""
        strikes = [asyncio.ensure_future(self._strike(death)) for death in self._schedule.deaths]
        while not self.journal.violations:
            self._lives += 1
            if await self._live():
                break
            await asyncio.sleep(RESTART_S)
        for strike in strikes:
            strike.cancel()
        await asyncio.wait(strikes)

    async def _live(self) -> bool:
        """One start of the driver; True when the run came to its end."""
        journal = self.journal
        journal.version, self._started = 0, False
        self._struck.clear()
        self._driver, self._gone = Process("driver"), self._loop.create_future()
        task = self._loop.create_task(resume_run(self._schedule, self._run), context=self._driver.context)
        limit = checks.life_limit_s(self._schedule.config)
        await asyncio.wait([task, self._gone], timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        self._note(
            "end of start", self._lives, repr(task.exception()) if task.done() else "it was killed or takes too long"
        )
        if self._gone.done():
            return False
        if not task.done():
            journal.violation(f"promise 6: the run still goes on after {limit:.0f} s")
            return True
        await self._end_as_asyncio_run_does(self._driver)
        journal.violations += checks.left_behind(self._loop, self._driver, self._cluster.actors)
        self._cluster.die(self._driver)  # as ray.shutdown() does
        error, self._driver = task.exception(), None
        if error is not None:
            journal.violations += checks.ended_by_error(
                self._schedule.config, error, self._struck, self._started, self._loop.time()
            )
            return False
        checkpoint = Checkpoints(self._run.checkpoints, 1).latest()
        facts = checks.read_checkpoint(checkpoint)
        journal.violations += checks.exactly_once(journal, facts)
        journal.violations += checks.staleness(journal)
        journal.violations += checks.leaves(journal)
        self._tasks = len({row.group for row in journal.rows})
        return True

    async def _end_as_asyncio_run_does(self, driver: Process) -> None:
        if left := self._loop.tasks_of(driver):
            for task in left:
                task.cancel()
            await asyncio.wait(left, timeout=checks.END_S)

    @contextlib.asynccontextmanager
    async def _watched_system(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """The production system; before it is ended, everything must have come to rest."""
        async with system(*args, **kwargs) as parts:
            self._started = True
            yield parts
            self.journal.violations += await checks.at_rest(self._loop, self._cluster)

    # -- deaths --------------------------------------------------------------------------------------------------

    async def _strike(self, death: Death) -> None:
        await self.journal.until(death.after)
        # At the next batch at the latest, so that no schedule ends before its deaths.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(death.delay_s):
                await self.journal.until(death.after + 1)
        while self._driver is None or self._driver.dead:
            await asyncio.sleep(RESTART_S)
        victim = self._victim(death.kind) or self._victim(COMMON)
        while victim is None:  # the run is starting or ending
            await asyncio.sleep(RESTART_S)
            victim = self._victim(death.kind) or self._victim(COMMON)
        kind = victim.kind if isinstance(victim, Actor) else "driver"
        self._struck.append((self._loop.time(), kind))
        self._deaths.append(kind)
        self._cluster.die(victim)
        if victim is self._driver and self._gone is not None:
            self._gone.set_result(None)

    def _victim(self, kind: str) -> Process | None:
        if kind == "driver":
            return self._driver
        living = self._cluster.alive(kind)
        if len(living) < (2 if kind in ("Generator", "Coordinator") else 1):
            return None
        return self.journal.rng.choice(living)

    # -- chance --------------------------------------------------------------------------------------------------

    def _duration(self, actor: Actor, method: str) -> float:
        if actor.kind == "EnvWorker" and method in ENV_METHODS:
            return self._schedule.environment.draw(self.journal.rng)
        return 0.001

    def _mishap(self, actor: Actor, method: str) -> Exception | None:
        if actor.kind == "EnvWorker" and method in ENV_METHODS and self.journal.rng.random() < self._schedule.raises:
            return RuntimeError("the simulated environment raised")
        return None

    def _note(self, *event: Any) -> None:
        stamped = (round(self._loop.time(), 6), *event)
        if self._keep:
            self._trace.append(stamped)
        if self._tell:
            self._tell(" ".join(str(part) for part in stamped))


async def resume_run(schedule: Schedule, run: RunDir) -> Mapping[str, Any]:
    """What ``asyncrl train --resume`` does to an unfinished run, from its newest checkpoint or from its start."""
    config = schedule.config
    checkpoint = Checkpoints(run.checkpoints, config.runtime.keep_checkpoints).latest()
    return await production.train(config, "unused", run, Tracker([]), checkpoint)


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Garbage collections come at times of their own, and would end tasks that nothing refers to."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _quiet(tell: Callable[[str], None] | None, loop: VirtualLoop) -> Iterator[None]:
    """What production code logs is told with its virtual time, or to nobody."""

    class Teller(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            assert tell is not None
            tell(f"{loop.time():.6f} {record.levelname} {record.name}: {record.getMessage()}")

    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    if tell is None:
        logging.disable(logging.CRITICAL)
    else:
        root.handlers[:] = [Teller()]
        root.setLevel(logging.INFO)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        root.handlers[:] = handlers
        root.setLevel(level)
