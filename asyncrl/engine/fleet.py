"""All generators of a run, seen from one client: routing, broadcast, sums.

Invariants: a fleet holds handles and its own counts, no engine; several clients (coordinators, the driver) may each
have one over the same generators. Every wait has a bound, and an error names the generator. A generator that died, or
whose engine did, is left out from then on as long as another lives. One that is fenced is left out of everything but
publishing; each client learns of it from the generator itself, and so asks again now and then. After a publish nobody
serves older weights: who does not say that it serves the new ones or is fenced, is ended.
"""

import asyncio
import logging
import random
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any, Self

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from asyncrl.config.engine import EngineConfig
from asyncrl.config.thinking import ThinkingConfig
from asyncrl.engine.base import EngineDied, EngineFenced, brief, cause_of
from asyncrl.engine.generator import Generator
from asyncrl.engine.waits import now
from asyncrl.types import Generation, Probe, Sampling

log = logging.getLogger(__name__)

CONCURRENCY = 10_000
"""Calls in progress in one actor: above any number of waiting requests, so that ``pause`` never queues behind them."""
REMEMBERED = 4096
"""Groups whose generator a client remembers; the oldest are forgotten."""
GRACE_S = 10.0
"""What a client waits beyond a generator's own bound, which ends the work and has the better message."""
STATS_TIMEOUT_S = 20.0
"""Counters are only looked at: whose are not there soon are done without."""
FENCED_RETRY_S = 1.0
"""How long a client leaves a generator alone that is fenced, which a publish may have ended since, or out of reach."""
ADVICE = (
    "its last lines are in this run's output and in Ray's session logs; if memory ran out, lower "
    "engine.kv_cache_gib, engine.gpu_memory_utilization or engine.max_num_seqs; then start the run again"
)


class GenerationFailed(RuntimeError):
    """No generator could answer a turn; the cause is the infrastructure's, never the policy's."""


class GeneratorDied(RuntimeError):
    """A generator's actor or its engine process has ended; one sentence says which and what to do."""


class Fleet:
    """Broadcasts go to all that live; who fails is logged and left out of the answer.

    Raises GeneratorDied: from :meth:`pause`, when none is left. They stay dead: the run has to end.
    """

    def __init__(self, handles: Sequence[Any], config: EngineConfig) -> None:
        """``handles``: generator actors, in the order that gives them their names."""
        self.handles = list(handles)
        self.version = 0
        """The last version that a generator was labelled with through this client."""
        self.fenced: list[int] = []
        """Indices of those that live and missed the last publish."""
        self._config = config
        self._load = [0] * len(self.handles)
        self._dead: dict[int, str] = {}
        self._alone_until: dict[int, float] = {}
        self._home: OrderedDict[str, int] = OrderedDict()

    @classmethod
    def create(
        cls, config: EngineConfig, model_path: str, dtype: str, seed: int, thinking: ThinkingConfig | None = None
    ) -> Self:
        """Place ``config.generators`` actors, seeded ``seed``, ``seed + 1``, ...; :meth:`start` loads their models."""
        actor: Any = ray.remote(Generator).options(
            num_cpus=config.cpus, num_gpus=config.gpus, max_concurrency=CONCURRENCY
        )
        numbers = range(config.generators)
        return cls([actor.remote(model_path, config, dtype, seed + i, _name(i), thinking) for i in numbers], config)

    async def start(self) -> None:
        """Load the models, all at once, or raise. Bounded by ``engine.start_timeout_s``."""
        _, failures = await self._everywhere("start", timeout_s=self._config.start_timeout_s)
        for error in failures.values():
            raise error

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, key: str, near: str = "") -> Generation:
        """One turn, by the least loaded generator, or by the one that served ``near`` before and has its prefixes.

        While all are fenced the turn waits for a publish, up to ``engine.generate_timeout_s``.

        Args:
            key: the turn's own id.
            near: what shares prompts, e.g. the group's key; empty shares with nothing.

        Raises GenerationFailed: no generator is alive or serves in time, or the one asked failed or did not answer.
        """
        bound = self._config.generate_timeout_s
        until = now() + bound
        while now() <= until:
            at = self._route(near)
            if at is None:
                await asyncio.sleep(FENCED_RETRY_S)
                continue
            self._load[at] += 1
            try:
                return await self._ask(at, "generate", bound, tuple(prompt_ids), sampling, key)
            except (GeneratorDied, EngineFenced, ActorUnavailableError) as error:
                log.debug("turn %s goes to another generator: %s", key, error)
            except (RayTaskError, TimeoutError) as error:
                raise GenerationFailed(f"{_name(at)}, turn {key}: {cause_of(error)}") from error
            finally:
                self._load[at] -= 1
        raise GenerationFailed(f"turn {key}: every generator was fenced or out of reach for {bound:g} s")

    def living(self) -> list[int]:
        """Indices of those not known to be dead. Raises GeneratorDied when none is left."""
        living = [at for at in range(len(self.handles)) if at not in self._dead]
        if not living:
            *_, last = self._dead.values()
            raise GeneratorDied(f"all {len(self.handles)} generators are dead; the last: {last}")
        return living

    def _route(self, near: str) -> int | None:
        """Whom to ask; None while all are fenced."""
        try:
            serving = [at for at in self.living() if self._alone_until.get(at, 0.0) <= now()]
        except GeneratorDied as error:
            raise GenerationFailed(str(error)) from error
        if not serving:
            return None
        at = self._home.get(near, -1)
        if at not in serving:
            # Ties at random: clients count only their own requests and would otherwise all begin with the first.
            at = min(serving, key=lambda i: (self._load[i], random.random()))
        if near:
            self._home[near] = at
            self._home.move_to_end(near)
            if len(self._home) > REMEMBERED:
                self._home.popitem(last=False)
        return at

    async def score_everywhere(self, probes: Sequence[Probe]) -> list[list[list[float]]]:
        """Log-probs of each probe, from each generator that serves: [generators][probes][tokens].

        Raises RuntimeError: none does.
        """
        bound = self._config.generate_timeout_s
        scored = await asyncio.gather(
            *(self._everywhere("score", tuple(ids), start, timeout_s=bound) for ids, start in probes)
        )
        served = [at for at in self.living() if all(at in answers for answers, _ in scored)]
        if not served:
            raise RuntimeError(f"no generator scored the probes: {[failures for _, failures in scored]}")
        return [[answers[at] for answers, _ in scored] for at in served]

    async def pause(self, members: Sequence[int] | None = None) -> list[int]:
        """Returns the indices of those that are paused now, fenced ones among them: whom a publish can serve.

        ``members``: whom to pause; all that live where none are given.
        """
        paused, _ = await self._everywhere("pause", members=members)
        self.living()
        return list(paused)

    async def update_weight_version(self, version: int, members: Sequence[int]) -> list[int]:
        """Label the weights of those that hold them whole; returns the indices that took the label."""
        labelled, _ = await self._everywhere("update_weight_version", str(version), members=members)
        if labelled:
            self.version = version
        return list(labelled)

    async def resume(self, members: Sequence[int] | None = None) -> None:
        """Those of ``members``, or all, that hold ``version`` serve it now; the others are fenced, or dead.

        Who does not answer may have missed the pause too, and would serve older weights; or it waits, paused for ever.
        Nothing that it can be told would change that, so it is ended.
        """
        resumed, failures = await self._everywhere("resume", str(self.version), members=members)
        for at, error in failures.items():
            if not isinstance(error, GeneratorDied | EngineFenced):
                self._dead[at] = f"{error}, and it was ended; {ADVICE}"
                log.error("%s", self._dead[at])
                ray.kill(self.handles[at])
        missed = (set(self.fenced) - set(resumed)) | set(failures)
        self.fenced = sorted(missed - set(self._dead))

    async def stats(self) -> dict[str, float]:
        """Counters since start, summed over the generators that answer soon; empty if none does."""
        total: Counter[str] = Counter()
        everyone = range(len(self.handles))  # an actor outlives its engine
        answers, _ = await self._everywhere("stats", members=everyone, timeout_s=STATS_TIMEOUT_S)
        for counts in answers.values():
            total.update(counts)
        return dict(total)

    async def shutdown(self) -> None:
        """End engines and actors; whatever state they are in, nothing is left when this returns."""
        try:
            await self._everywhere("shutdown", timeout_s=GRACE_S)
        finally:
            for handle in self.handles:
                ray.kill(handle)

    async def _everywhere(
        self, method: str, *args: Any, members: Sequence[int] | None = None, timeout_s: float | None = None
    ) -> tuple[dict[int, Any], dict[int, Exception]]:
        """Call all that live, or ``members``, at once: answers and failures, after each has come to either."""
        bound = self._config.publish_timeout_s if timeout_s is None else timeout_s
        asked = [at for at in range(len(self.handles)) if at not in self._dead] if members is None else members
        calls = (self._ask(at, method, bound, *args) for at in asked)
        answers: dict[int, Any] = {}
        failures: dict[int, Exception] = {}
        for at, result in zip(asked, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if not isinstance(result, BaseException):
                answers[at] = result
            elif not isinstance(result, Exception):
                raise result
            else:
                known = isinstance(result, GeneratorDied | EngineFenced)
                failures[at] = result if known else RuntimeError(f"{_name(at)}: {method} failed: {cause_of(result)}")
                log.warning("%s", failures[at])
        return answers, failures

    async def _ask(self, at: int, method: str, timeout_s: float, *args: Any) -> Any:
        reference = getattr(self.handles[at], method).remote(*args)
        try:
            async with asyncio.timeout(timeout_s + GRACE_S) as limit:
                return await reference
        except asyncio.CancelledError:
            _cancel(reference)  # or the engine would go on with what nobody waits for
            raise
        except Exception as error:
            cause = cause_of(error)
            if isinstance(cause, EngineFenced | ActorUnavailableError):  # the latter may have got the call all the same
                self._alone_until[at] = now() + FENCED_RETRY_S
                raise cause from None
            if isinstance(cause, ActorDiedError | EngineDied):
                self._dead[at] = f"{_name(at)} died: {brief(error)}; {ADVICE}"
                raise GeneratorDied(self._dead[at]) from error
            if limit.expired():
                _cancel(reference)
                raise TimeoutError(f"no answer within {timeout_s + GRACE_S:g} s") from error
            raise


def _cancel(reference: Any) -> None:
    if isinstance(reference, ray.ObjectRef):
        ray.cancel(reference)


def _name(at: int) -> str:
    return f"generator-{at}"
