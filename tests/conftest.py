"""What tests share: one local Ray cluster, tiny models, one generator. All made on first use, all ended at the end."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# A busy machine is not a failing test.
hypothesis.settings.register_profile("asyncrl", deadline=None, max_examples=50)
hypothesis.settings.load_profile("asyncrl")
os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    RAY_USAGE_STATS_ENABLED="0",
    WANDB_MODE="offline",
)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A Ray cluster of this session's own."""
    import ray

    ray.init(
        address="local",
        num_cpus=8,  # tests queue for real cores, not for Ray's count of them
        object_store_memory=256 * 2**20,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="warning",
    )
    yield
    ray.shutdown()


def save_tiny_model(path: Path, tied: bool, seed: int = 0) -> Path:
    """A random Qwen3 model without a tokenizer: 256 tokens, end token 2, distributions far from uniform."""
    from transformers import GenerationConfig

    from tests.tiny_qwen import tiny_qwen

    model = tiny_qwen(
        seed,
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        initializer_range=0.15,
        eos_token_id=2,
        bos_token_id=None,
        pad_token_id=0,
    )
    model.generation_config = GenerationConfig(eos_token_id=[2], pad_token_id=0)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny model with tied embeddings."""
    return save_tiny_model(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with an output head of its own."""
    return save_tiny_model(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.fixture(scope="session")
def generator(ray_cluster: None, tiny_model: Path) -> Iterator[Any]:
    """A started :class:`~asyncrl.engine.generator.Generator` actor on ``tiny_model``, shared by the whole session.

    Tests may publish to it; they leave it running, with the weights of ``tiny_model``.
    """
    with running_generator(tiny_model) as handle:
        yield handle


@contextmanager
def running_generator(model: Path, max_model_len: int = 512) -> Iterator[Any]:
    import ray

    from asyncrl.config.engine import EngineConfig
    from asyncrl.engine.generator import Generator

    config = EngineConfig(max_num_seqs=16, max_model_len=max_model_len, kv_cache_gib=0.05)
    handle = ray.remote(Generator).options(num_cpus=1, max_concurrency=1000).remote(str(model), config, "float32", 0)
    ray.get(handle.start.remote(), timeout=config.start_timeout_s)
    yield handle
    ray.get(handle.shutdown.remote(), timeout=30)
    ray.kill(handle)
