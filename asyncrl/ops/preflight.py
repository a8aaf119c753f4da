"""What can be known to be wrong before any actor starts.

``asyncrl.config`` checks what a file says; here the world is asked: is the environment there, its splits, what it
needs on this machine, the model's folder. All problems are reported at once, each under its field's path.
"""

from collections.abc import Iterator
from pathlib import Path

from asyncrl.config.load import ConfigError
from asyncrl.config.run import RunConfig
from asyncrl.model.load import ModelNotFound, check_model_folder, load_tokenizer


def preflight(config: RunConfig, out: Path | None = None) -> None:
    """``out``: folder that is to be made: it must not exist, or be empty.

    Raises ConfigError: something the run needs is missing; one line each.
    """
    problems = [*_environment(config), *_model(config), *_reasoning(config)]
    if out is not None and out.exists() and not (out.is_dir() and not any(out.iterdir())):
        problems.append(f"--out: {out} exists already; name a new folder")
    if problems:
        raise ConfigError(problems)


def _environment(config: RunConfig) -> Iterator[str]:
    env = config.env
    try:
        env_class = env.spec.env_class()
    except ValueError as error:
        yield f"env.name: {error}"
        return
    try:
        env_class.preflight()
    except Exception as error:
        yield f"env.name: {env.name} cannot run here: {error}"
        return
    if env_class.moves == "search" and config.thinking and config.thinking.tti and "<action>" in config.thinking.tail:
        yield f"thinking.tail: {env.name} has no <action>, so every turn that is cut would be invalid; set it to '\\n'"
    options = {"env.options": env.options}
    if config.sft is not None:
        options["sft.demonstrator"] = {**env.options, **config.sft.demonstrator}
    for field, given in options.items():
        try:
            made = env_class(**given)  # which starts nothing
        except Exception as error:
            yield f"{field}: {env.name} does not take them: {error}"
            continue
        try:
            made.check_splits(env.train_split, env.test_split)
        except ValueError as error:
            yield f"env.train_split, env.test_split: {error}"
        made.close()
    for field in ("train_split", "test_split"):
        split = getattr(env, field)
        try:
            if not len(env_class.tasks(split)):
                yield f"env.{field}: split {split!r} of {env.name} holds no task"
        except ValueError as error:
            yield f"env.{field}: {error}"


def _model(config: RunConfig) -> Iterator[str]:
    if config.model.path is not None:
        try:
            check_model_folder(config.model.path)
        except ModelNotFound as error:
            yield str(error)
    elif config.engine.max_model_len > config.model.tiny.max_length:
        yield (
            f"engine.max_model_len: {config.engine.max_model_len} exceeds "
            f"model.tiny.max_length = {config.model.tiny.max_length}"
        )


def _reasoning(config: RunConfig) -> Iterator[str]:
    """Cutting thinking needs a tokenizer that has the tags; without a folder the run makes one that does."""
    path, thinking = config.model.path, config.thinking
    if thinking is None or path is None or not Path(path).is_dir():
        return
    from asyncrl.engine.thinking import REASONING, reasoning_tags

    try:
        reasoning_tags(load_tokenizer(path), REASONING, thinking.tail)
    except ValueError as error:
        yield str(error)
