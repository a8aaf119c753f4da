"""Which policy is trained."""

from typing import Literal

from pydantic import Field

from asyncrl.config.base import Strict


class TinyConfig(Strict):
    """Shape of a model made on the spot (Qwen3 architecture, random weights)."""

    layers: int = Field(4, ge=1)
    hidden: int = Field(128, ge=16)
    heads: int = Field(4, ge=1)
    kv_heads: int = Field(2, ge=1)
    intermediate: int = Field(384, ge=16)
    vocab: int = Field(1024, ge=300)
    """Upper bound on the vocabulary; the tokenizer is trained on the environment's own text."""
    episodes: int = Field(40, ge=1)
    """Tasks whose texts the tokenizer is trained on."""
    max_length: int = Field(2560, ge=64)
    """Longest sequence, in tokens."""
    tied: bool = True
    """Whether the output head shares the embedding's weights."""


class ModelConfig(Strict):
    path: str | None = None
    """Folder in Hugging Face format; None makes a tiny model on the spot from ``tiny``."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and activations, in engine and learner alike."""
    tiny: TinyConfig = TinyConfig()
