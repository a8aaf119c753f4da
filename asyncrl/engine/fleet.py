"""All generators of a run, seen from one client: routing, broadcast, sums.

Invariants: a fleet holds handles and its own counts, no engine; several clients (coordinators, the driver) may each
have one over the same generators. Every wait has a bound, and an error names the generator. Turns are routed around a
generator that died, or whose engine did, as long as another lives; publishing needs all of them.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from asyncrl.config.engine import EngineConfig
from asyncrl.engine.base import Engine, EngineDied, cause_of
from asyncrl.engine.generator import Generator
from asyncrl.engine.scripted import ScriptedEngine, find_script
from asyncrl.types import Generation, Sampling

log = logging.getLogger(__name__)

CONCURRENCY = 10_000
"""Calls in progress in one actor: above any number of waiting requests, so that ``pause`` never queues behind them."""
REMEMBERED = 4096
"""Groups whose generator a client remembers; the oldest are forgotten."""
GRACE_S = 10.0
"""What a client waits beyond a generator's own bound, which ends the work and has the better message."""
ADVICE = (
    "its last lines are in this run's output and in Ray's session logs; if memory ran out, lower "
    "engine.kv_cache_gib, engine.gpu_memory_utilization or engine.max_num_seqs; then start the run again"
)


class GenerationFailed(RuntimeError):
    """No generator could answer a turn; the cause is the infrastructure's, never the policy's."""


class GeneratorDied(RuntimeError):
    """A generator's actor or its engine process has ended; one sentence says which and what to do."""


class Fleet:
    """Any call but :meth:`generate`, :meth:`stats` and :meth:`shutdown` needs every generator.

    Raises:
        GeneratorDied: a generator is dead. It stays dead: the run has to end.
        RuntimeError: a generator failed or did not answer in time.
    """

    def __init__(self, handles: Sequence[Any], config: EngineConfig) -> None:
        """
        Args:
            handles: generator actors, in the order that gives them their names.
        """
        self.handles = list(handles)
        self._config = config
        self._load = [0] * len(self.handles)
        self._dead: dict[int, str] = {}
        self._home: OrderedDict[str, int] = OrderedDict()

    @classmethod
    def create(cls, config: EngineConfig, model_path: str, dtype: str, seed: int) -> Fleet:
        """Place ``config.generators`` actors, seeded ``seed``, ``seed + 1``, ...; :meth:`start` loads their models."""
        actor: type[Engine]
        arguments: list[tuple[Any, ...]]
        numbers = range(config.generators)
        if config.kind == "scripted":
            script = find_script(str(config.script))
            actor, arguments = ScriptedEngine, [(script, seed + i) for i in numbers]
        else:
            actor = Generator
            arguments = [(model_path, config, dtype, seed + i, _name(i)) for i in numbers]
        options = {"num_cpus": config.cpus, "num_gpus": config.gpus, "max_concurrency": CONCURRENCY}
        remote: Any = ray.remote(actor)
        return cls([remote.options(**options).remote(*given) for given in arguments], config)

    async def start(self) -> None:
        """Load the models, all at once. Bounded by ``engine.start_timeout_s``."""
        await self._everywhere("start", timeout_s=self._config.start_timeout_s)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, key: str, near: str = "") -> Generation:
        """One turn, by the least loaded generator, or by the one that served ``near`` before and has its prefixes.

        Args:
            key: the turn's own id.
            near: what shares prompts, e.g. the group's key; empty shares with nothing.

        Raises:
            GenerationFailed: no generator is alive, or the one asked failed or did not answer in time.
        """
        while True:
            at = self._route(near)
            self._load[at] += 1
            try:
                return await self._ask(
                    at, "generate", self._config.generate_timeout_s, tuple(prompt_ids), sampling, key
                )
            except GeneratorDied as died:
                log.warning("turn %s goes to another generator: %s", key, died)
            except (RayTaskError, TimeoutError) as error:
                raise GenerationFailed(f"{_name(at)}, turn {key}: {cause_of(error)}") from error
            finally:
                self._load[at] -= 1

    def _route(self, near: str) -> int:
        at = self._home.get(near, -1)
        if at < 0 or at in self._dead:
            living = [i for i in range(len(self.handles)) if i not in self._dead]
            if not living:
                *_, last = self._dead.values()
                raise GenerationFailed(f"all {len(self.handles)} generators are dead; the last: {last}")
            # Ties at random: clients count only their own requests and would otherwise all begin with the first.
            at = min(living, key=lambda i: (self._load[i], random.random()))
        if near:
            self._home[near] = at
            self._home.move_to_end(near)
            if len(self._home) > REMEMBERED:
                self._home.popitem(last=False)
        return at

    async def score_everywhere(self, probes: Sequence[tuple[Sequence[int], int]]) -> list[list[list[float]]]:
        """Log-probs of each probe ``(ids, start)``, from each generator: [generators][probes][len(ids) - start]."""
        return await _all(
            _all(self._named(at, "score", self._config.generate_timeout_s, tuple(ids), start) for ids, start in probes)
            for at in range(len(self.handles))
        )

    async def pause(self) -> None:
        await self._everywhere("pause")

    async def resume(self) -> None:
        await self._everywhere("resume")

    async def update_weight_version(self, version: int) -> None:
        await self._everywhere("update_weight_version", str(version))

    async def versions(self) -> list[int]:
        """The version of each generator."""
        return await self._everywhere("version")

    async def stats(self) -> dict[str, float]:
        """Counters since start, summed over the generators that answer; empty if none does."""
        bound = self._config.publish_timeout_s
        calls = [self._named(at, "stats", bound) for at in range(len(self.handles))]
        total: defaultdict[str, float] = defaultdict(float)
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(answer, RuntimeError):
                log.warning("counters without those of a generator: %s", answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                for name, count in answer.items():
                    total[name] += count
        return dict(total)

    async def shutdown(self) -> None:
        """End engines and actors; whatever state they are in, nothing is left when this returns."""
        try:
            await self._everywhere("shutdown", timeout_s=GRACE_S)
        except Exception as error:
            log.warning("shutdown: %s", error)
        for handle in self.handles:
            ray.kill(handle)

    async def _everywhere(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        """Call all generators at once; answers in their order, after all have answered or failed."""
        bound = self._config.publish_timeout_s if timeout_s is None else timeout_s
        return await _all(self._named(at, method, bound, *args) for at in range(len(self.handles)))

    async def _named(self, at: int, method: str, timeout_s: float, *args: Any) -> Any:
        try:
            return await self._ask(at, method, timeout_s, *args)
        except (RayTaskError, TimeoutError) as error:
            raise RuntimeError(f"{_name(at)}: {method} failed: {cause_of(error)}") from error

    async def _ask(self, at: int, method: str, timeout_s: float, *args: Any) -> Any:
        reference = getattr(self.handles[at], method).remote(*args)
        try:
            async with asyncio.timeout(timeout_s + GRACE_S) as limit:
                return await reference
        except (RayActorError, RayTaskError) as error:
            cause = cause_of(error)
            if not isinstance(cause, RayActorError | EngineDied):
                raise
            first_line = str(cause).partition("\n")[0].rstrip(".")
            self._dead[at] = f"{_name(at)} died: {first_line}; {ADVICE}"
            raise GeneratorDied(self._dead[at]) from error
        except TimeoutError as error:
            if not limit.expired():  # the generator's own
                raise
            ray.cancel(reference)
            raise TimeoutError(f"no answer within {timeout_s + GRACE_S:g} s") from error
        except asyncio.CancelledError:
            ray.cancel(reference)  # or the engine would go on with what nobody waits for
            raise


async def _all(calls: Any) -> list[Any]:
    """Like gather, but a failure is raised only when every call has ended."""
    awaitables: list[Awaitable[Any]] = list(calls)
    results = await asyncio.gather(*awaitables, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return list(results)


def _name(at: int) -> str:
    return f"generator-{at}"
