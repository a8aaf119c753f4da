"""A language model small enough for any test: Qwen3, two layers, four heads over two of keys and values."""

from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM


def tiny_qwen(seed: int = 0, **shape: Any) -> Qwen3ForCausalLM:
    """Random weights; ``shape`` names the fields of the configuration that are to be otherwise."""
    usual = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
    fixed = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**(usual | fixed | shape)))
