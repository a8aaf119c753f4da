"""Turns measured and steered inside a real vLLM engine, against what the learner's side computes.

On a machine with a GPU the engine is the GPU's, with CUDA graphs, and so is the adapter.
"""

import asyncio
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.config.model import TinyConfig
from asyncrl.config.thinking import ThinkingConfig
from asyncrl.engine.processor import engine_arguments
from asyncrl.engine.reports import TURN
from asyncrl.engine.thinking import Report, Tag, reasoning_tags
from asyncrl.model.tiny import make_tiny
from asyncrl.text.parse import parse
from asyncrl.types import Signals

pytestmark = pytest.mark.integration
TIMEOUT_S = 240
GPU = torch.cuda.is_available()
TOLERANCE = 1e-3
"""Of log-probs and signals."""
SIZE = TinyConfig(layers=2, hidden=64, heads=2, kv_heads=1, intermediate=64, vocab=512, max_length=256, tied=False)
CONFIG = ThinkingConfig(window=4, min_tokens=8, cap=20, top_j=10, series=True)
TAIL = "\n<action>"
TEXTS = ["<think> so the door is shut now</think>\n<action> open door</action> <explore> look</explore>"] * 5


class Running:
    """An engine on an event loop of its own; what is asked of it may come from any thread."""

    def __init__(self, folder: Path, config: ThinkingConfig | None, blocks: int) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.folder, self.config = folder, config
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.tags = reasoning_tags(self.tokenizer, ["think", "explore"], TAIL)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        bytes_a_token = SIZE.layers * 2 * SIZE.kv_heads * (SIZE.hidden // SIZE.heads) * 4
        arguments = AsyncEngineArgs(
            model=str(folder),
            dtype="float32",
            enforce_eager=not GPU,
            gpu_memory_utilization=0.4,
            max_num_seqs=16,
            max_model_len=SIZE.max_length,
            max_num_batched_tokens=64,  # longer prompts come in pieces
            block_size=32,
            kv_cache_memory_bytes=blocks * 32 * bytes_a_token,
            distributed_executor_backend="uni",
            **engine_arguments(config, self.tags if config else [], GPU),
        )

        async def start() -> Any:
            return AsyncLLM.from_engine_args(arguments)

        self.llm = self.call(start())

    def call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(TIMEOUT_S)

    async def turn(self, key: str, prompt: Sequence[int], temperature: float, max_tokens: int) -> list[int]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=temperature,
            max_tokens=max_tokens,
            extra_args={TURN: key},
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        async for output in self.llm.generate({"prompt_token_ids": list(prompt)}, params, key):
            final = output
        return list(final.outputs[0].token_ids)

    async def take(self, lengths: Mapping[str, int]) -> list[Report | None]:
        ask, found = dict(lengths), {}
        while lengths.keys() - found:
            (here,) = await self.llm.collective_rpc("take_turns", args=(ask,))
            ask, found = {}, found | here
            await asyncio.sleep(0.01)
        return [(row := found[key]) and Report(row[0], Signals(*row[1])) for key in lengths]

    def logits(self, prompt: Sequence[int], ids: Sequence[int]) -> np.ndarray:
        """(T, V) that the learner's side has for each token of ``ids``."""
        with torch.inference_mode():
            found = self.model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        return found.double().numpy()

    def stop(self) -> None:
        self.llm.shutdown(5.0)
        self._loop.call_soon_threadsafe(self._loop.stop)


@contextmanager
def running(folder: Path, config: ThinkingConfig | None, blocks: int) -> Iterator[Running]:
    os.environ.update(VLLM_LOGGING_LEVEL="WARNING", OMP_NUM_THREADS="1", VLLM_WORKER_MULTIPROC_METHOD="spawn")
    os.environ["TRITON_F32_DEFAULT"] = "ieee"  # a GPU's attention would multiply in TF32
    engine = Running(folder, config, blocks)
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Random weights, and a KV cache that holds a part of the turns sent to it."""
    folder = make_tiny(tmp_path_factory.mktemp("random"), SIZE, TEXTS, seed=1)
    with running(folder, CONFIG, blocks=14) as engine:
        yield engine


def scale(values: list[float], value: float) -> float:
    low, high = min(values), max(values)
    return 0.0 if high - low < 1e-6 else (value - low) / (high - low)


def told(logits: np.ndarray, ids: Sequence[int], config: ThinkingConfig, tags: Sequence[Tag]) -> dict[str, Any]:
    """T2PO's rules, told over a finished turn whose logits are known."""
    hs, cs, ms = [], [], []
    tag, opened, closed, start, rule = 0, 0, None, None, ""
    for t, (x, token) in enumerate(zip(logits, ids, strict=True)):
        log_p = x - x.max() - math.log(np.exp(x - x.max()).sum())
        hs.append(float(-(np.exp(log_p) * log_p).sum()))
        cs.append(float(-np.sort(log_p)[::-1][: config.top_j].mean()))
        ms.append(config.alpha * scale(hs, hs[-1]) + (1 - config.alpha) * (1 - scale(cs, cs[-1])))
        deltas = np.abs(np.diff(ms))[-(config.window + 1) :]
        if start is None and closed is None:
            stable = t >= config.min_tokens and len(deltas) == config.window + 1 and deltas.mean() < config.eps
            if stable or t - opened >= config.cap:
                start, rule = t, "stable" if stable else "cap"
        for number, (opener, closer, _) in enumerate(tags):
            if closed is None and [token] == closer[0]:
                closed = t
            elif closed is None and [token] == opener[0]:
                tag, opened = number, t + 1
    end = len(ids) if start is None else min(start + len(tags[tag].queue), len(ids))
    forced = (0, 0) if start is None else (start, end)
    own = [t for t in range(len(ids)) if not forced[0] <= t < forced[1]]
    turn_h, turn_c = [hs[t] for t in own], [cs[t] for t in own]
    turn_m = [config.alpha * scale(turn_h, hs[t]) + (1 - config.alpha) * (1 - scale(turn_c, cs[t])) for t in own]
    return {
        "own": own,
        "forced": forced,
        "queue": tags[tag].queue,
        "rule": rule,
        "thinking_tokens": (len(ids) if closed is None else closed) - opened,
        "phi": math.exp(np.mean([math.log(max(m, 1e-6)) for m in turn_m])),
        "entropy": np.mean(turn_h),
        "confidence": np.mean(turn_c),
        "m": ms,
    }


def assert_told(
    engine: Running, prompt: Sequence[int], ids: list[int], temperature: float, report: Report | None
) -> dict[str, Any]:
    """Log-probs, firing token, forced ids and signals are those of the learner's logits for the same ids."""
    assert report is not None and report.signals is not None
    logits, signals = engine.logits(prompt, ids), report.signals
    exact = told(logits, ids, engine.config, engine.tags)
    start, end = exact["forced"]
    assert (signals.rule, tuple(signals.forced)) == (exact["rule"], exact["forced"])
    assert ids[start:end] == exact["queue"][: end - start]
    assert len(report.logprobs) == len(ids)
    scaled = torch.tensor(logits / temperature).log_softmax(-1)
    for place, (token, logprob) in enumerate(zip(ids, report.logprobs, strict=True)):
        expected = float(scaled[place, token]) if place in exact["own"] else 0.0
        assert logprob == pytest.approx(expected, abs=TOLERANCE)
    assert signals.thinking_tokens == exact["thinking_tokens"]
    assert signals.m == pytest.approx(exact["m"], abs=TOLERANCE)
    for name in ("phi", "entropy", "confidence"):
        assert getattr(signals, name) == pytest.approx(exact[name], rel=2 * TOLERANCE), name
    return exact


def some_turns(engine: Running, count: int, longest: int) -> dict[str, tuple[list[int], float, int]]:
    source = np.random.default_rng(longest)
    size = len(engine.tokenizer)
    return {
        f"{longest}/{i}": (
            [int(x) for x in source.integers(3, size - 6, 10 + 13 * (i % 9))],
            (1.0, 0.4)[i % 2],
            int(source.integers(longest // 2, longest)),
        )
        for i in range(count)
    }


async def all_told(engine: Running, turns: dict[str, Any], beside: Callable[[], Any] | None = None) -> list[Any]:
    company = asyncio.create_task(beside()) if beside else None
    answers = await asyncio.gather(*(engine.turn(key, *turn) for key, turn in turns.items()))
    if company:
        await company
    reports = await engine.take({key: len(ids) for key, ids in zip(turns, answers, strict=True)})
    return [
        assert_told(engine, prompt, ids, temperature, report)
        for (prompt, temperature, _), ids, report in zip(turns.values(), answers, reports, strict=True)
    ]


def preemptions() -> float:
    from vllm.v1.metrics.reader import get_metrics_snapshot

    return sum(metric.value for metric in get_metrics_snapshot() if metric.name == "vllm:num_preemptions")


def test_turns_are_measured_and_cut_as_the_formulas_say_while_the_engine_preempts_them(crowded):
    before = preemptions()
    found = crowded.call(all_told(crowded, some_turns(crowded, 80, longest=70)))
    assert preemptions() > before
    assert {"cap"} <= {exact["rule"] for exact in found}
    assert any(exact["rule"] == "" for exact in found)


def test_pauses_that_recompute_everything_change_nothing(crowded):
    pauses = 0

    async def pause() -> None:
        nonlocal pauses
        for _ in range(6):
            await asyncio.sleep(0.05)
            await crowded.llm.pause_generation(mode="keep", clear_cache=True)
            pauses += 1
            await crowded.llm.resume_generation()

    crowded.call(all_told(crowded, some_turns(crowded, 12, longest=71), beside=pause))
    assert pauses == 6


def test_turns_in_the_places_of_ended_ones_are_told_as_well(crowded):
    for longest in range(20, 28):
        crowded.call(all_told(crowded, some_turns(crowded, 12, longest)))


def test_requests_of_others_and_aborted_turns_leave_no_trace(crowded):
    from vllm import SamplingParams

    async def company() -> None:
        late = asyncio.create_task(crowded.turn("aborted", [5, 6, 7], 1.0, 200))
        scoring = SamplingParams(max_tokens=1, prompt_logprobs=0)
        async for _ in crowded.llm.generate({"prompt_token_ids": list(range(3, 90))}, scoring, "scored"):
            pass
        late.cancel()
        await asyncio.gather(late, return_exceptions=True)
        await crowded.llm.collective_rpc("drop_turns", args=(["aborted", "never seen"],))

    crowded.call(all_told(crowded, some_turns(crowded, 8, longest=72), beside=company))
    assert crowded.call(crowded.take({"aborted": 1})) == [None]


# ---- a model whose logits settle -------------------------------------------------------------------------------------

CHAIN = [" so", " the", " door", " is", " shut", " now"]
"""What the scripted model thinks, one word after the other; the last it repeats for ever."""


@pytest.fixture(scope="module")
def settling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The next token is a matter of the last: a chain of words, then one that follows itself."""
    folder = make_tiny(tmp_path_factory.mktemp("scripted"), SIZE, TEXTS, seed=2)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    steps = {"user": "<think>", "assistant": "<explore>", "<think>": CHAIN[0], "<explore>": CHAIN[0]}
    steps |= dict(zip(CHAIN, [*CHAIN[1:], CHAIN[-1]], strict=True))
    steps |= {"<action>": " open", " open": "</action>", "</action>": "<|im_end|>"}

    def id_of(text: str) -> int:
        (token,) = tokenizer.encode(text, add_special_tokens=False)
        return int(token)

    with torch.no_grad():
        for layer in model.model.layers:  # what a layer adds to the last token's own embedding
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
        embedding.zero_()
        head.zero_()
        for at, (last, following) in enumerate(steps.items()):
            embedding[id_of(last), at] = 1
            head[id_of(following), at] = (12 + at % 5) / math.sqrt(SIZE.hidden)  # the final norm scales by the root
        model.save_pretrained(folder)
    with running(folder, CONFIG, blocks=64) as engine:
        yield engine


@pytest.mark.parametrize(("first", "tag", "method"), [("user", "think", "react"), ("assistant", "explore", "spark")])
def test_a_thought_that_settles_is_cut_at_the_token_the_formula_says_and_the_text_parses(settling, first, tag, method):
    prompt = settling.tokenizer.encode(first, add_special_tokens=False)
    ids = settling.call(settling.turn(first, prompt, 0.4, 60))
    (report,) = settling.call(settling.take({first: len(ids)}))
    exact = assert_told(settling, prompt, ids, 0.4, report)
    # The tag and six words come before the settled logits' first place, 7; N + 1 = 5 changes of nothing follow it.
    assert (exact["rule"], exact["forced"][0]) == ("stable", 7 + 5)
    text = settling.tokenizer.decode(ids[:-1])
    assert text == f"<{tag}>{''.join(CHAIN)}{CHAIN[-1] * 5}</{tag}>\n<action> open</action>"
    parsed = parse(text, method)
    assert (parsed.valid, parsed.action, parsed.tag) == (True, "open", tag)
