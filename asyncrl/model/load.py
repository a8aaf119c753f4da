"""Loading a tokenizer or a causal language model from a folder in Hugging Face format.

Invariants: nothing is ever fetched; a folder that does not hold what is asked for is refused with a message that
names it, what is missing, and what to do.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.model.folder import check_model_folder

if TYPE_CHECKING:  # seconds to import, and this module is known to processes that load nothing
    from transformers import PreTrainedModel


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer of a model folder.

    Raises:
        ModelNotFound: see :func:`check_model_folder`.
        ValueError: the tokenizer has no chat template or no end token.
    """
    from transformers import AutoTokenizer

    folder = check_model_folder(path)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if not tokenizer.chat_template:
        raise ValueError(f"model.path {str(path)!r}: its tokenizer has no chat template, so it cannot be prompted")
    if tokenizer.eos_token_id is None:
        raise ValueError(f"model.path {str(path)!r}: its tokenizer has no end token (eos_token)")
    return tokenizer


def load_causal_lm(path: str | Path, dtype: str = "float32", attention: str = "sdpa") -> PreTrainedModel:
    """The language model of a model folder, on the CPU, in ``dtype`` (``"float32"`` or ``"bfloat16"``)."""
    from transformers import AutoModelForCausalLM

    folder = check_model_folder(path)
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=attention, local_files_only=True
    )
