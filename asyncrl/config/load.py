"""From YAML files and ``key.path=value`` overrides to one validated ``RunConfig``.

Invariants:

* Composition is a pure function of the files: ``extends`` names one file or a list, relative to the file it stands in;
  bases merge in order, then the file itself, then the overrides; sections merge key by key, every other value (lists
  and null too) replaces what was there.
* Nothing is guessed: an unknown key, a key given twice, a cycle of ``extends`` or a value out of range is a
  ``ConfigError`` that names the field's path, what was given and what is allowed, all problems at once.
"""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from asyncrl.config.run import RunConfig


class ConfigError(Exception):
    """Bad input from the user. ``problems`` holds one line each; ``str()`` gives them all."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


def load(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The validated configuration of ``path`` with ``key.path=value`` overrides applied in order.

    Raises ConfigError: unreadable file, broken YAML, a bad override, or values that do not validate.
    """
    return validate(read(Path(path)), overrides, source=str(path))


def read(path: Path, parents: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The composed but not yet validated content of ``path``, which ``parents`` extend."""
    resolved = path.resolve()
    if resolved in parents:
        chain = " -> ".join(p.name for p in (*parents, resolved))
        raise ConfigError(f"{parents[-1]}: extends goes in a circle: {chain}")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        by = f" (named by extends in {parents[-1]})" if parents else ""
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{resolved}: cannot read the configuration file{by}: {reason}") from None
    content = _parse(text, str(path))
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected sections (key: value), got {_show(content)}")
    bases = content.pop("extends", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not (isinstance(bases, list) and all(isinstance(base, str) for base in bases)):
        raise ConfigError(f"{path}: extends must be a file name or a list of them, got {_show(bases)}")
    composed: dict[str, Any] = {}
    for base in bases:
        composed = merge(composed, read(path.parent / base, (*parents, resolved)))
    return merge(composed, content)


def validate(tree: Mapping[str, Any], overrides: Sequence[str] = (), source: str = "config") -> RunConfig:
    """The configuration of a composed tree and overrides. ``source`` names it in messages; raises as ``load`` does."""
    tree = dict(tree)
    for override in overrides:
        _apply(tree, override)
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError([f"{source}: {_explain(problem)}" for problem in error.errors()]) from None


def dump(config: RunConfig) -> str:
    """The resolved configuration as YAML; ``validate(yaml.safe_load(dump(c))) == c``."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``over`` laid on ``base``: sections merge, everything else replaces."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


class _UniqueKeys(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, where YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key_node.value!r} is given twice", key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _UniqueKeys)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{where}:{at} not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not valid YAML: {error}") from None


def _apply(tree: dict[str, Any], override: str) -> None:
    path, equals, value = override.partition("=")
    keys = path.split(".")
    if not equals or not all(keys):
        raise ConfigError(f"override {override!r}: expected key.path=value, e.g. tree.leaves=8")
    section = tree
    for depth, key in enumerate(keys[:-1], start=1):
        below = section.get(key)
        if below is None:
            below = {}
        if not isinstance(below, dict):
            raise ConfigError(f"override {override!r}: {'.'.join(keys[:depth])} is a value, not a section")
        # A fresh dict at each level: composed files may share sections.
        section[key] = dict(below)
        section = section[key]
    section[keys[-1]] = _parse(value, f"override {override!r}")


def _explain(problem: Mapping[str, Any]) -> str:
    """One pydantic error as one line: path, what is wrong, what was given, what is allowed."""
    loc, kind, message = problem["loc"], problem["type"], problem["msg"]
    path = ".".join(str(part) for part in loc)
    if kind == "extra_forbidden":
        known = _fields_at(loc[:-1])
        near = difflib.get_close_matches(str(loc[-1]), known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        return f"{path}: unknown key; {hint}allowed here: {', '.join(known)}"
    if kind == "missing":
        return f"{path}: required, but not given"
    if kind in ("model_type", "model_attributes_type"):
        return f"{path}: expected a section (keys: {', '.join(_fields_at(loc))}), got {_show(problem['input'])}"
    if kind == "value_error":
        # Rules that tie several fields together say themselves what was given and what is allowed.
        return f"{path + ': ' if path else ''}{message.removeprefix('Value error, ')}"
    allowed = message.replace("Input should be", "must be", 1)
    if kind == "string_pattern_mismatch":
        allowed = f"must match {problem['ctx']['pattern']}"
    near = difflib.get_close_matches(str(problem["input"]), allowed.split("'")[1::2], n=1)
    hint = f"; did you mean {near[0]!r}?" if kind == "literal_error" and near else ""
    return f"{path}: {allowed}, got {_show(problem['input'])}{hint}"


def _fields_at(loc: Sequence[int | str]) -> list[str]:
    """Field names of the config model found by walking ``loc`` from the top."""
    model: type[BaseModel] = RunConfig
    for part in loc:
        annotation = model.model_fields[str(part)].annotation
        candidates = (annotation, *get_args(annotation))
        model = next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))
    return list(model.model_fields)


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
