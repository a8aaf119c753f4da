"""Models in folders of Hugging Face format: whether one is there, its tokenizer, its language model.

Invariants: nothing is ever fetched; a folder that does not hold what is asked for is refused with a message that
names it, what is missing, and what to do; nothing heavy is imported before something is loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


class ModelNotFound(ValueError):
    """The folder is missing, or it does not hold a model."""


def check_model_folder(path: str | Path) -> Path:
    """``path``, if it looks like a model in Hugging Face format.

    Raises ModelNotFound: no such folder; no configuration; no weights; no tokenizer.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ModelNotFound(
            f"model.path {str(path)!r}: no such folder; give a folder in Hugging Face format, "
            "or leave model.path out to make a tiny model on the spot"
        )
    needed = {"config.json": ["config.json"], "weights": ["*.safetensors", "*.bin"], "tokenizer": ["tokenizer*"]}
    missing = [what for what, patterns in needed.items() if not any(any(folder.glob(p)) for p in patterns)]
    if missing:
        raise ModelNotFound(
            f"model.path {str(path)!r} is not a model in Hugging Face format: no {', no '.join(missing)}"
        )
    return folder


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer of a model folder.

    Raises:
        ModelNotFound: see :func:`check_model_folder`.
        ValueError: the tokenizer has no chat template or no end token.
    """
    import transformers

    folder = check_model_folder(path)
    # tokenizer.json says all that a class of the model's own would; finding that class imports PyTorch and every model.
    whole = (folder / "tokenizer.json").is_file()
    kind: Any = transformers.PreTrainedTokenizerFast if whole else transformers.AutoTokenizer
    tokenizer = kind.from_pretrained(folder, local_files_only=True)
    if not tokenizer.chat_template:
        raise ValueError(f"model.path {str(path)!r}: its tokenizer has no chat template, so it cannot be prompted")
    if tokenizer.eos_token_id is None:
        raise ValueError(f"model.path {str(path)!r}: its tokenizer has no end token (eos_token)")
    return tokenizer


def load_causal_lm(
    path: str | Path, dtype: str = "float32", attention: str = "sdpa", device: torch.device | str = "cpu"
) -> PreTrainedModel:
    """The language model of a model folder, in ``dtype`` (``"float32"`` or ``"bfloat16"``)."""
    from transformers import AutoModelForCausalLM

    folder = check_model_folder(path)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=attention, local_files_only=True
    )
    return model.to(device)  # type: ignore[arg-type]  # a decorator hides that it is a method
