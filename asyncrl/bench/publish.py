"""Publishing weights, measured: seconds a phase and bytes a second, beside what the device copies in the same run.

Invariants: an optimizer step precedes every publish, and the log-probs of engine and learner are compared before and
after it: they must differ and then agree, or the measurement fails. Engines are shut down on every way out.

    python -m asyncrl.bench.publish --backend ipc --model 1.5b --json publish.json
"""

import asyncio
import json
import logging
import random
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

import ray
import torch
from torch.utils.benchmark import Timer
from typer import Option, run

from asyncrl.config.engine import EngineConfig
from asyncrl.config.learner import LearnerConfig
from asyncrl.engine.fleet import Fleet
from asyncrl.learner.group import LearnerGroup
from asyncrl.model.tiny import train_tokenizer
from asyncrl.runtime.publish import logprob_gap, publish
from asyncrl.runtime.system import ACTOR_ENV
from asyncrl.types import Probe, Row

log = logging.getLogger(__name__)

SHAPES = {"1.5b": (1536, 28, 12, 2, 8960, 151936), "tiny": (128, 2, 2, 1, 256, 512)}
"""Width, layers, heads, key-value heads, inner width, vocabulary of a Qwen2 model; the first is Qwen2.5-1.5B's."""
GPUS = {"asyncrl_cpu": (0.0, 0.0), "ipc": (0.5, 0.4), "nccl": (1.0, 1.0)}
"""Of one generator and of the learner, by transport."""
GAP_MAX = {"float32": 1e-2, "bfloat16": 0.25}
PROMPT, RESPONSE, ROWS = 32, 32, 4


def make_model(shape: str, folder: Path, dtype: str, tied: bool = True) -> Path:
    """Write a model of :data:`SHAPES` with random weights to ``folder``; ``tied``: the head is the embedding."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    fields = "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"
    shaped = dict(zip((*fields, "intermediate_size", "vocab_size"), SHAPES[shape], strict=True))
    config = Qwen2Config.from_dict({**shaped, "tie_word_embeddings": tied, "eos_token_id": 2})
    Qwen2ForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)
    train_tokenizer([], 512).save_pretrained(folder)
    return folder


def copy_gbs(nbytes: int) -> float:
    """GB/s of one copy of that many bytes within the device, best of five."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source, target = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    timer = Timer("target.copy_(source)", globals={"target": target, "source": source})
    best = min(timer.timeit(1).mean for _ in range(5))
    del source, target, timer
    torch.cuda.empty_cache()
    return nbytes / best / 1e9


async def measure(backend: str, model: Path, dtype: str, publishes: int = 5) -> dict[str, Any]:
    """Train and publish the model folder ``model``, on a connected Ray cluster.

    Raises RuntimeError: the log-probs did not differ before a publish, or did not agree after it.
    """
    gpus, learner_gpus = GPUS[backend]
    nbytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    result: dict[str, Any] = {"backend": backend, "bytes": nbytes, "device_copy_gbs": copy_gbs(nbytes), "publishes": []}
    log.info("%.2f GB of weights; the device copies %.0f GB/s", nbytes / 1e9, result["device_copy_gbs"])
    engine = EngineConfig(gpus=gpus, max_model_len=256, kv_cache_gib=0.05, gpu_memory_utilization=0.3)
    draw = random.Random(0)
    probes = [Probe(draw.choices(range(3, 500), k=PROMPT + RESPONSE), PROMPT) for _ in range(ROWS)]
    fleet = Fleet.create(engine, str(model), dtype, seed=0)
    learner = LearnerGroup.create(str(model), LearnerConfig(gpus=learner_gpus), None, dtype)
    try:
        await fleet.start()  # before the learner takes memory: the engine measures what is free
        log.info("the generator is ready")
        await learner.start()
        await learner.connect(fleet.handles, engine.publish_timeout_s)
        log.info("the learner is ready")
        for version in range(1, publishes + 1):
            await learner.sft_step([Row(ids[:start], ids[start:]) for ids, start in probes], lr=1e-3)
            ours = await learner.logprobs(probes)
            stale_gap = logprob_gap(ours, await fleet.score_everywhere(probes))["publish/logprob_gap"]
            figures = await publish(fleet, learner, version)
            figures |= logprob_gap(ours, await fleet.score_everywhere(probes))
            figures |= {"gbs": nbytes / figures["publish/transfer_s"] / 1e9, "stale_gap": stale_gap}
            result["publishes"].append(figures)
            log.info("version %d: %s", version, ", ".join(f"{name} {value:.4g}" for name, value in figures.items()))
            if figures["publish/logprob_gap"] >= min(GAP_MAX[dtype], stale_gap):
                raise RuntimeError(f"publish {version} did not bring the new weights to the generator")
    finally:
        await fleet.shutdown()
        await learner.shutdown()
    return result


def main(
    backend: Annotated[Literal["asyncrl_cpu", "ipc", "nccl"], Option(help="The transport.")],
    model: Annotated[str, Option(help=f"A model folder, or one of {', '.join(SHAPES)}")] = "1.5b",
    dtype: Annotated[Literal["float32", "bfloat16"], Option(help="Of weights and activations.")] = "bfloat16",
    to: Annotated[Path | None, Option("--json", help="File for all figures.")] = None,
) -> None:
    """Measure publishing weights."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    with (
        tempfile.TemporaryDirectory() as made,
        ray.init("local", include_dashboard=False, logging_level=logging.ERROR, runtime_env={"env_vars": ACTOR_ENV}),
    ):
        folder = make_model(model, Path(made), dtype) if model in SHAPES else Path(model)
        result = asyncio.run(measure(backend, folder, dtype))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    result |= {"model": model, "dtype": dtype, "device": device, "torch": torch.__version__}
    if to:
        to.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    run(main)
