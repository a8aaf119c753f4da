"""Which policy is trained."""

from typing import Literal

from pydantic import Field, model_validator

from asyncrl.config.base import Strict

HEAD_DIMS = (32, 64, 80, 96, 112, 128, 192, 256)
"""Widths of an attention head that the engine runs on a CPU."""


class TinyConfig(Strict):
    """Shape of a model made on the spot (Qwen3 architecture, random weights)."""

    layers: int = Field(4, ge=1)
    hidden: int = Field(128, ge=32)
    heads: int = Field(4, ge=1)
    kv_heads: int = Field(2, ge=1)
    intermediate: int = Field(384, ge=16)
    vocab: int = Field(1024, ge=300)
    """Upper bound on the vocabulary; the tokenizer is trained on the environment's own text."""
    tasks: int = Field(40, ge=1)
    """Tasks whose texts the tokenizer is trained on."""
    max_length: int = Field(2560, ge=64)
    """Longest sequence, in tokens."""
    tied: bool = True
    """Whether the output head shares the embedding's weights."""

    @model_validator(mode="after")
    def _heads_fit(self) -> "TinyConfig":
        if self.hidden % self.heads or self.heads % self.kv_heads:
            raise ValueError(
                f"hidden ({self.hidden}) must be a multiple of heads ({self.heads}), "
                f"and heads of kv_heads ({self.kv_heads})"
            )
        if (width := self.hidden // self.heads) not in HEAD_DIMS:
            raise ValueError(
                f"hidden / heads = {self.hidden} / {self.heads} = {width}, but a head must be "
                f"{', '.join(map(str, HEAD_DIMS))} wide: the engine has no attention on the CPU for other widths"
            )
        return self


class ModelConfig(Strict):
    path: str | None = None
    """Folder in Hugging Face format; None makes a tiny model on the spot from ``tiny``."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and activations, in engine and learner alike."""
    tiny: TinyConfig = TinyConfig()
