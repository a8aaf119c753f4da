"""What measuring and steering turns costs the engine: tokens a second with and without, all in one run.

Invariants: every way of generating serves the same prompts at the same length, with as many requests in flight; a
round times each of them once, in an order of its own, and the first round only warms up. Both engines are there all
the while, so none has more of the device than another.
"""

import asyncio
import json
import logging
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import torch

from asyncrl.bench.publish import SHAPES, make_model
from asyncrl.bench.runs import markdown
from asyncrl.config.engine import EngineConfig
from asyncrl.config.thinking import ThinkingConfig
from asyncrl.engine.generator import Generator, sampling_params
from asyncrl.runtime.system import ACTOR_ENV

log = logging.getLogger(__name__)

PROMPT = 64
"""Tokens."""
TOP = 20

Way = Callable[[Sequence[int]], Awaitable[int]]
"""Answers a prompt; returns the length of the response."""


class Served(Generator):
    async def answer(self, prompt: Sequence[int], tokens: int, logprobs: int | None = None, own: bool = False) -> int:
        """A response of ``tokens`` tokens, whatever they are; returns their number.

        Args:
            logprobs: how many a token vLLM returns itself.
            own: go the way of a run, where the engine's own processor reports on the turn.
        """
        params = sampling_params(max_tokens=tokens, ignore_eos=True, logprobs=logprobs)
        result, _ = await self._complete(prompt, params, "turn", measured=own)
        return len(result.outputs[0].token_ids)


async def measure(model: Path, in_flight: int, tokens: int, rounds: int) -> dict[str, list[float]]:
    """Tokens a second in each round, by way of generating.

    Args:
        model: a folder in Hugging Face format whose tokenizer has the reasoning tags.
        in_flight: requests at once.
        tokens: of each response.
    """
    gpu = torch.cuda.is_available()
    config = EngineConfig(
        gpus=0.5 if gpu else 0,
        max_num_seqs=in_flight,
        max_model_len=PROMPT + tokens,
        gpu_memory_utilization=0.4,
        enforce_eager=not gpu,
    )
    engine, control = (Served(str(model), config, _dtype(), 0, thinking=how) for how in (None, ThinkingConfig()))
    ways: dict[str, Way] = {
        "plain": lambda prompt: engine.answer(prompt, tokens),
        "log-prob": lambda prompt: engine.answer(prompt, tokens, own=True),
        "control": lambda prompt: control.answer(prompt, tokens, own=True),
        "vLLM's log-prob": lambda prompt: engine.answer(prompt, tokens, logprobs=0),
        f"top {TOP}": lambda prompt: engine.answer(prompt, tokens, logprobs=TOP),  # to make the signals of, elsewhere
    }
    rates: dict[str, list[float]] = {way: [] for way in ways}
    draw = random.Random(0)
    try:
        for served in (engine, control):
            await served.start()
            log.info("an engine has started")
        for number in range(rounds + 1):
            log.info("round %d of %d%s", number, rounds, "" if number else ", which only warms up")
            for way in draw.sample(list(ways), len(ways)):
                # New ones each time: none finds its prefix cached.
                prompts = [draw.choices(range(3, 500), k=PROMPT) for _ in range(in_flight)]
                began = time.perf_counter()
                made = await asyncio.gather(*map(ways[way], prompts))
                if number:
                    rates[way].append(sum(made) / (time.perf_counter() - began))
    finally:
        await engine.shutdown()
        await control.shutdown()
    return rates


def table(rates: dict[str, list[float]]) -> str:
    """Medians, their ratio to the plain engine's, and the spread of the rounds."""
    medians = {way: statistics.median(measured) for way, measured in rates.items()}
    rows = [
        [way, f"{median:,.0f}", f"{median / medians['plain']:.3f}", f"{min(rates[way]):,.0f} to {max(rates[way]):,.0f}"]
        for way, median in medians.items()
    ]
    return markdown("way | tokens/s | to plain | rounds", rows)


def run(model: str, in_flight: int, tokens: int, rounds: int, to: Path | None) -> str:
    """Measure ``model``, a folder or one of ``SHAPES``; ``to`` gets all figures as JSON. Returns a Markdown table."""
    os.environ |= ACTOR_ENV
    with tempfile.TemporaryDirectory() as made:
        folder = make_model(model, Path(made), _dtype()) if model in SHAPES else Path(model)
        rates = asyncio.run(measure(folder, in_flight, tokens, rounds))
    if to:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        facts = {"command": sys.argv, "device": device, "torch": torch.__version__, "tokens_per_s": rates}
        to.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    return table(rates)


def _dtype() -> str:
    return "bfloat16" if torch.cuda.is_available() else "float32"
