"""An environment and its options in one word of a command line, e.g. ``sokoban,mode=image``."""

import inspect
import json
from typing import Any

from asyncrl.env import EnvSpec, find_env


def read_name(text: str) -> EnvSpec:
    """``NAME[,KEY=VALUE]...``; a value is JSON where it reads as such.

    Raises ValueError: no such environment or option, or an option without a value.
    """
    name, *options = text.split(",")
    pairs = [option.partition("=") for option in options]
    for key, equals, _ in pairs:
        if not equals:
            raise ValueError(f"{text!r}: option {key!r} has no value; write NAME,KEY=VALUE")
    spec = find_env(name, {key: _value(value) for key, _, value in pairs})
    taken = inspect.signature(spec.env_class())
    try:
        taken.bind(**spec.options)
    except TypeError as error:
        raise ValueError(f"{text!r}: {error}; {name} takes {', '.join(taken.parameters) or 'no options'}") from None
    return spec


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
