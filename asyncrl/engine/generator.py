"""A generator: one vLLM engine, made to live in a Ray actor and awaited through its handle.

Token ids go in and come out; text never crosses this line. Versions are integers, 0 at start, and only a completed
publish changes them:

    pause() -> [learner ranks: start_weight_update, update_weights ..., finish_weight_update] ->
    update_weight_version(str(version)) -> resume(str(version))

``resume`` is called whether or not the transfer succeeded, with the version that is to be served from then on. The
calls of a transfer carry the number of their round: one that comes when its round is over changes nothing.

Invariants:

* Requests in flight are kept over a publish, and their spans are the engine's own record of which weights made which
  token. A request that has no token when generation pauses, or comes later, is prefilled after it, under the new
  version's cache salt: what the spans name is what made the keys and values that those tokens saw.
* Weights that a failed publish left incomplete or behind are never sampled from: the generator is fenced, its requests
  fail with the reason, and a complete publish opens it again.
* Every wait has a bound; the engine's process ends with this one, however this one ends.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from asyncrl.config.engine import EngineConfig
from asyncrl.config.thinking import ThinkingConfig
from asyncrl.engine.base import EngineDied, EngineFenced
from asyncrl.engine.plugin import ENGINE_CHILD
from asyncrl.engine.reports import TURN, Report, Reports
from asyncrl.engine.state import UNKNOWN, Counters, Gate
from asyncrl.engine.waits import bounded, now
from asyncrl.types import Generation, Sampling, VersionSpan, token_digest

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from asyncrl.engine.thinking import Tag


@dataclass(eq=False)
class Generator:
    """Whatever needs the engine raises EngineDied once its process has ended."""

    model_path: str
    config: EngineConfig
    dtype: str
    seed: int
    """Of the engine's sampling."""
    name: str = "generator"
    """How errors call it."""
    thinking: ThinkingConfig | None = None
    """Measure turns, and cut their thinking, while they are generated."""

    def __post_init__(self) -> None:
        self._reports = Reports()
        self._llm: AsyncLLM | None = None
        self._sockets = TemporaryDirectory(prefix="asyncrl-", dir=os.environ.get("VLLM_RPC_BASE_PATH"))
        """Between front end and engine process, and their rendezvous; vLLM removes none of them."""
        self._numbers = itertools.count()
        self._requests: set[asyncio.Task[Any]] = set()
        self._gate = Gate(self.name)
        self._counters = Counters()

    async def start(self) -> None:
        """Load the model; returns when requests can be served."""
        os.environ.update(self._environment())
        from vllm import AsyncEngineArgs
        from vllm.envs import enable_envs_cache
        from vllm.v1.engine.async_llm import AsyncLLM

        from asyncrl.engine.processor import engine_arguments
        from asyncrl.engine.thinking import REASONING, reasoning_tags
        from asyncrl.engine.transfer import backend_for
        from asyncrl.model.load import load_tokenizer

        config, gpu = self.config, self.config.gpus > 0
        kv_cache_gib = config.kv_cache_gib or (None if gpu else 1)
        placement: dict[str, Any] = (
            {"gpu_memory_utilization": config.gpu_memory_utilization}
            if gpu
            else {
                "block_size": 32,  # tokens, the unit of prefix reuse; vLLM's own 128 exceed many a shared prefix
                "distributed_executor_backend": "uni",
            }
        )
        tags: Sequence[Tag] = ()
        if self.thinking:
            tags = reasoning_tags(load_tokenizer(self.model_path), REASONING, self.thinking.tail)
        self._stop = _end_tokens(Path(self.model_path))
        # Blocks this actor's loop on purpose: nothing can be served before it returns, and the thread that starts the
        # engine process must live as long as the actor, because the process is bound to it.
        self._llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=self.model_path,
                skip_tokenizer_init=True,
                dtype=self.dtype,  # type: ignore[arg-type]
                seed=self.seed,
                max_num_seqs=config.max_num_seqs,
                max_model_len=config.max_model_len,
                enforce_eager=config.enforce_eager,
                enable_prefix_caching=config.prefix_caching,
                kv_cache_memory_bytes=kv_cache_gib and int(kv_cache_gib * 2**30),
                disable_log_stats=True,
                weight_transfer_config={"backend": backend_for(config.gpus)},  # type: ignore[arg-type]
                **placement,
                **engine_arguments(self.thinking, tags, gpu),
            )
        )
        enable_envs_cache()  # or the front end reads its settings from the environment at every request
        await self._llm.get_supported_tasks()  # remembered: from here on nothing lies between the gate and the engine
        await self.update_weight_version("0")
        self._counters.book()

    def _environment(self) -> dict[str, str]:
        """Read by vLLM at import, and by the engine process, which inherits it; every actor's is in ``ACTOR_ENV``."""
        common = {
            ENGINE_CHILD: "1",
            "VLLM_RPC_BASE_PATH": self._sockets.name,
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # this process has threads, and may have a CUDA context
            "VLLM_ENGINE_READY_TIMEOUT_S": str(int(self.config.start_timeout_s)),
        }
        if self.config.gpus > 0:
            # CUDA IPC handles travel to the engine process as Python objects.
            return common | {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
        return common | {
            "TMPDIR": self._sockets.name,
            "TORCHDYNAMO_DISABLE": "1",
            # "0" lets the model run in the engine's process instead of one more; the front end stays apart either way.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "OMP_NUM_THREADS": str(max(1, int(self.config.cpus))),
            # Threads that wait by spinning take the cores from learner and environments.
            "OMP_WAIT_POLICY": "PASSIVE",
        }

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, key: str) -> Generation:
        """One turn; at temperature 0 the log-probs are those of the distribution at temperature 1.

        ``key`` is the turn's own id, which state inside the engine is kept under.

        Raises:
            EngineFenced: before or during the request.
            RuntimeError: the generator is not started, or vLLM ended the request without an answer.
            TimeoutError: longer than ``engine.generate_timeout_s``, pauses included.
            ValueError: the prompt leaves no room for a token within ``engine.max_model_len``.
        """
        began = now()
        params = sampling_params(
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens,
            stop_token_ids=self._stop,
            skip_clone=True,
        )
        result, report = await self._complete(prompt_ids, params, key, measured=True)
        output = result.outputs[0]
        if output.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"{self.name}: turn {key} ended by {output.finish_reason!r} instead of a token")
        assert report is not None
        logprobs, signals = report
        self._counters.book(
            requests=1,
            prompt_tokens=len(prompt_ids),
            cached_prompt_tokens=result.num_cached_tokens or 0,
            tokens_generated=len(output.token_ids),
        )
        return Generation(
            token_ids=tuple(output.token_ids),
            logprobs=tuple(logprobs),
            digest=token_digest(output.token_ids),
            spans=tuple(VersionSpan(int(span.version), span.start, span.end) for span in output.weight_versions),
            finish=output.finish_reason,
            seconds=now() - began,
            signals=signals,
        )

    async def score(self, ids: Sequence[int], start: int) -> list[float]:
        """Log-probs at temperature 1 of ``ids[start:]``, each given what precedes it, under the current weights.

        ``start`` is at least 1: nothing precedes the first token.
        """
        if not 1 <= start <= len(ids):
            raise ValueError(f"score: start must be in 1..{len(ids)} (the number of ids), got {start}")
        result, _ = await self._complete(ids, sampling_params(max_tokens=1, prompt_logprobs=0), "score")
        # One entry a token, but none for the first, which nothing precedes.
        return list(result.prompt_logprobs.logprobs[start - 1 :])

    async def _complete(
        self, ids: Sequence[int], params: Any, key: str, measured: bool = False
    ) -> tuple[Any, Report | None]:
        """vLLM's answer and, of a measured turn, what the engine kept of it."""
        from vllm.inputs.engine import tokens_input

        llm = self._engine()
        if len(ids) >= self.config.max_model_len:
            raise ValueError(
                f"{self.name}: turn {key} has {len(ids)} prompt tokens; engine.max_model_len = "
                f"{self.config.max_model_len} must exceed that: raise it or lower prompt.max_prompt_tokens"
            )
        task = asyncio.current_task()
        assert task is not None
        self._requests.add(task)
        self._counters.book(come=1)
        try:
            async with self._bounded(f"turn {key}", "generate_timeout_s"):
                while True:
                    await self._gate.passed()
                    prompt = tokens_input(list(ids), cache_salt=str(self._gate.version))
                    name = f"{key}#{next(self._numbers)}"
                    result, report = await self._ask(llm, prompt, params, name, measured)
                    if result.outputs[0].finish_reason != "abort":  # else pause() withdrew it
                        return result, report
        except asyncio.CancelledError:
            self._gate.check()
            raise
        finally:
            self._requests.discard(task)
            self._counters.book(come=-1)

    async def _ask(
        self, llm: AsyncLLM, prompt: Any, params: Any, name: str, measured: bool
    ) -> tuple[Any, Report | None]:
        report = None
        if measured:
            params.extra_args = {TURN: name}
        try:
            async for output in llm.generate(prompt, params, name):
                result = output  # the only one: FINAL_ONLY
            if measured and result.outputs[0].finish_reason in ("stop", "length"):
                report = await self._reports.take(llm, name, len(result.outputs[0].token_ids))
            return result, report
        finally:
            if measured and report is None:
                self._reports.drop(llm, name)

    async def pause(self) -> None:
        """Freeze generation; requests that have a token are kept, others start anew after it."""
        llm = self._engine()
        self._gate.close()
        self._counters.book(paused=True)
        async with self._bounded("pause"):
            await llm.pause_generation(mode="keep", clear_cache=self.config.kv == "recompute")
            # Queued or half prefilled, they would look up, or go on with, keys and values of the weights that go now.
            requests = llm.output_processor.request_states.values()
            await llm.abort([request.external_req_id for request in requests if request.is_prefilling])

    async def resume(self, version: str) -> None:
        """Generation goes on.

        Raises EngineFenced: the weights in place are not a complete ``version``; from now on requests fail with it.
        """
        self._counters.book(paused=False)
        try:
            self._gate.open(version)
        except EngineFenced:
            for task in self._requests:
                task.cancel()
            raise
        await self._control("resume", self._engine().resume_generation())

    async def init_weight_transfer_engine(self, request: dict[str, Any]) -> None:
        """Meet a sender, whatever an earlier one has left behind."""
        from asyncrl.engine.transfer import backend_for, meet

        config, clean = self.config, self._gate.version != UNKNOWN
        meeting = meet(self._engine(), backend_for(config.gpus), request, clean, config.publish_timeout_s)
        await self._control("weight-transfer set-up", meeting)

    async def start_weight_update(self, round: int) -> None:
        """Begin round ``round`` of transfers; the one before is over."""
        self._gate.overwrite(round)
        await self._control("start of a weight update", self._engine().start_weight_update())

    async def update_weights(self, round: int, request: dict[str, Any]) -> None:
        from asyncrl.engine.transfer import backend_for, deliver

        config, check = self.config, partial(self._gate.check_round, round)
        delivery = deliver(self._engine(), backend_for(config.gpus), request, check, config.publish_timeout_s)
        await self._control("weight update", delivery)

    async def finish_weight_update(self, round: int) -> None:
        self._gate.check_round(round)
        await self._control("end of a weight update", self._engine().finish_weight_update())

    async def update_weight_version(self, version: str) -> None:
        """Label the weights now in place; the prefix cache's salt follows."""
        await self._control("version label", self._engine().update_weight_version(version))
        self._gate.version = int(version)

    async def stats(self) -> dict[str, float]:
        """Totals since start: see :class:`~asyncrl.engine.state.Counters`."""
        return self._counters.book()

    async def shutdown(self) -> None:
        """End the engine and its child processes; idempotent."""
        llm, self._llm = self._llm, None
        if llm is not None:
            await asyncio.to_thread(llm.shutdown, 0.0)
        self._sockets.cleanup()

    def _engine(self) -> AsyncLLM:
        if self._llm is None:
            raise RuntimeError(f"{self.name} is not running: await start() first, and nothing after shutdown()")
        return self._llm

    async def _control(self, what: str, call: Awaitable[None]) -> None:
        async with self._bounded(what):
            await call

    @asynccontextmanager
    async def _bounded(self, what: str, field: str = "publish_timeout_s") -> AsyncIterator[None]:
        try:
            async with bounded(getattr(self.config, field), f"{self.name}: {what}", f"engine.{field}"):
                yield
        except Exception as error:
            if self._llm is not None and self._llm.errored:
                raise EngineDied(f"its engine process ended ({what})") from error
            raise


def sampling_params(**settings: Any) -> Any:
    """vLLM's, for one answer that comes whole, as token ids."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    whole = RequestOutputKind.FINAL_ONLY
    return SamplingParams(flat_logprobs=True, detokenize=False, output_kind=whole, **settings)


def _end_tokens(model: Path) -> list[int]:
    """Ids that end a response: ``eos_token_id`` of generation_config.json, else of config.json.

    Raises ValueError: neither file names one, so no response would ever end before its length limit.
    """
    for file in (model / "generation_config.json", model / "config.json"):
        if file.exists() and (ids := json.loads(file.read_text()).get("eos_token_id")) is not None:
            return [ids] if isinstance(ids, int) else list(ids)
    raise ValueError(f"model {model}: eos_token_id is in neither generation_config.json nor config.json; add it there")
