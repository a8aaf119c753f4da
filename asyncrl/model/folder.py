"""Whether a folder holds a model in Hugging Face format. Light: answers before anything heavy is imported."""

from pathlib import Path


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
