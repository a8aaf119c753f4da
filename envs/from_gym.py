"""Gymnasium's text environments as asyncrl environments: an id, and words for what has none.

Invariants:

* The task id is the seed of the environment's ``reset``; ``Task.seed`` changes nothing. That the same seed begins alike
  is the environment's to keep, and ``asyncrl env check`` finds out whether it does.
* What is not an action now is answered here: it costs a turn and never reaches the environment.
* An episode ends when the environment ends it, or after ``max_turns`` turns.
"""

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import gymnasium
from gymnasium import spaces

from asyncrl.env import Env
from asyncrl.types import Observation, Step, Task

TRAIN, TEST = 4000, 500
"""Tasks of the splits: seeds 0 to 3999, and 4000 to 4499."""
TURNS = 50
"""The limit of an environment that is registered without one."""
IGNORED = "Nothing happens."
OPTIONS = ("id", "make", "actions", "goal", "max_turns", "success_above")
_COLOURED = re.compile(r"\x1b\[([\d;]+)m(.*?)\x1b\[0m", re.DOTALL)
_COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")


class _State(NamedTuple):
    """All of an episode but the environment within."""

    task: Task
    goal: str
    text: str
    admissible: tuple[str, ...] | None
    turns: int = 0
    over: bool = False


class GymnasiumText(Env):
    """A Gymnasium environment that is seen as text, and whose actions are text or a ``Discrete`` choice.

    What is seen is its observation where that is a string; its ``text`` where that is a mapping, and its ``goal`` if it
    has one; else its rendering (``make: {render_mode: ansi}``), colours in words: ``red[S]``. Its ``info`` may narrow
    the actions down: ``action_mask`` (discrete) or ``actions`` (a list of str).

    Success is ``info["success"]`` of the last step; where there is none, that the episode terminated with a last reward
    above ``success_above``.

    Each of these is an attribute of a subclass or, the first six, an option (``env.options``), which goes first. A
    subclass is what ``asyncrl env check`` and ``play`` take, and the only place for ``role`` and ``can_snapshot``.
    """

    id: str = ""
    """Gymnasium's; ``module:Name-v0`` imports the module that registers it."""
    make: Mapping[str, Any] = {}
    """Keyword arguments of ``gymnasium.make``."""
    actions: Sequence[str] | None = None
    """Names of the discrete actions, in order; None calls them by their numbers."""
    goal: str = "end the episode with success"
    """The task in words, where the observation holds no ``goal``."""
    max_turns: ClassVar[int] = 0
    """0 takes the limit that the id is registered with, or 50 where it has none."""
    success_above: float = 0.0
    role: ClassVar[str] = "You act in a text environment: read what it says and choose what to do."
    can_snapshot: ClassVar[bool] = False
    """True copies the environment with ``copy.deepcopy``, which must give all of its state, in values that pickle."""

    def __init__(self, **options: Any) -> None:
        """Raises ValueError: an option is unknown, or the id missing, unknown, or of an environment without text."""
        name = type(self).__name__
        if unknown := sorted(set(options) - set(OPTIONS)):
            raise ValueError(
                f"{name}: unknown options {', '.join(unknown)}; known: {', '.join(OPTIONS)} "
                "(role and can_snapshot are set in a subclass)"
            )
        vars(self).update(options)
        if not self.id:
            raise ValueError(f"{name}: id is missing; set env.options.id, or id in a subclass")
        try:
            self._env: gymnasium.Env[Any, Any] = gymnasium.make(self.id, disable_env_checker=True, **self.make)
        except (gymnasium.error.Error, ImportError, TypeError) as error:
            raise ValueError(
                f"{name}: cannot make id {self.id!r} with {dict(self.make)}: {error}; an id that a module of yours "
                "registers is written module:Name-v0"
            ) from error
        registered = self._env.spec.max_episode_steps if self._env.spec else None
        self.max_turns = self.max_turns or registered or TURNS  # type: ignore[misc]  # it differs by id
        self._names = self._action_names()
        self._seen_as_text()
        self._state = _State(Task(self.id, "0"), self.goal, "", None, over=True)

    @classmethod
    def tasks(cls, split: str) -> Sequence[str]:
        ranges = {"train": range(TRAIN), "test": range(TRAIN, TRAIN + TEST)}
        if split not in ranges:
            raise ValueError(f"{cls.__name__}: no split {split!r}; known: {', '.join(ranges)}")
        return [str(i) for i in ranges[split]]

    def reset(self, task: Task) -> Observation:
        seen, info = self._env.reset(seed=int(task.id))
        goal = str(seen["goal"]) if isinstance(seen, Mapping) and "goal" in seen else self.goal
        self._state = _State(task, goal, self._text(seen), self._admissible(info))
        return self._observe()

    def step(self, action: str) -> Step:
        info: Mapping[str, Any] = {}
        state = self._state
        if state.over:
            raise RuntimeError(f"{type(self).__name__}: the episode is over; call reset first")
        given = self._read(action)
        if given is None:
            ignored = state.text if state.text.startswith(IGNORED) else f"{IGNORED}\n{state.text}"
            state, reward, terminated, truncated = state._replace(text=ignored), 0.0, False, False
        else:
            seen, paid, terminated, truncated, info = self._env.step(given)
            state, reward = state._replace(text=self._text(seen), admissible=self._admissible(info)), float(paid)
        terminated, turns = bool(terminated), state.turns + 1
        truncated = not terminated and (bool(truncated) or turns >= self.max_turns)
        over = terminated or truncated
        self._state = state._replace(turns=turns, over=over)
        success = bool(info.get("success", terminated and reward > self.success_above))
        return Step(self._observe(), reward, terminated, truncated, {"success": success} if over else {})

    def list_actions(self) -> tuple[str, ...] | None:
        return () if self._state.over else self._state.admissible

    def snapshot(self) -> tuple[_State, gymnasium.Env[Any, Any]]:
        return self._state, copy.deepcopy(self._env)

    def restore(self, snapshot: tuple[_State, gymnasium.Env[Any, Any]]) -> Observation:
        self._state, self._env = snapshot[0], copy.deepcopy(snapshot[1])
        return self._observe()

    def close(self) -> None:
        self._env.close()

    def _action_names(self) -> tuple[str, ...] | None:
        """None where any text is an action. Raises ValueError: neither text nor discrete, or not as many names."""
        space, name = self._env.action_space, type(self).__name__
        if isinstance(space, spaces.Text):
            return None
        if not isinstance(space, spaces.Discrete):
            raise ValueError(f"{name}: {self.id} takes {space} as actions; only Text and Discrete can be said in words")
        first, count = int(space.start), int(space.n)
        names = tuple(str(first + i) for i in range(count)) if self.actions is None else tuple(self.actions)
        if len(set(names)) != count:
            raise ValueError(f"{name}: actions must hold {count} different names for {self.id}, got {list(names)}")
        return names

    def _seen_as_text(self) -> None:
        """Raises ValueError: the environment shows neither text nor a rendering in text."""
        space = self._env.observation_space
        written = space.spaces.get("text") if isinstance(space, spaces.Dict) else space
        self._rendered = not isinstance(written, spaces.Text)
        if self._rendered and self._env.render_mode != "ansi":
            raise ValueError(
                f"{type(self).__name__}: {self.id} shows {space}, which is no text; set make to "
                "{render_mode: ansi} if it can draw itself in text"
            )

    def _text(self, seen: Any) -> str:
        if self._rendered:
            return _uncoloured(str(self._env.render()))
        return str(seen["text"] if isinstance(seen, Mapping) else seen)

    def _admissible(self, info: Mapping[str, Any]) -> tuple[str, ...] | None:
        if self._names is None:
            return tuple(info["actions"]) if info.get("actions") is not None else None
        mask = info.get("action_mask", [True] * len(self._names))
        return tuple(name for name, holds in zip(self._names, mask, strict=True) if holds)

    def _read(self, action: str) -> Any:
        """What the environment is given, or None where ``action`` is none of its."""
        action = action.strip()
        if self._state.admissible is not None and action not in self._state.admissible:
            return None
        space = self._env.action_space
        if isinstance(space, spaces.Discrete) and self._names is not None:
            return int(space.start) + self._names.index(action)
        return action if action in space else None

    def _observe(self) -> Observation:
        guide = "any text" if self._state.admissible is None else ""
        return Observation(self._state.text, self._state.goal, self.list_actions(), action_guide=guide)


def _uncoloured(text: str) -> str:
    """A terminal's colours in words: a coloured ``S`` becomes ``red[S]``. Drawings say with them where things are."""

    def in_words(match: re.Match[str]) -> str:
        codes = [int(code) for code in match[1].split(";") if code]
        return "".join(_COLOURS[code % 10] for code in codes if 30 <= code <= 47 and code % 10 < 8) + f"[{match[2]}]"

    return _COLOURED.sub(in_words, text).strip("\n")


class FrozenLake(GymnasiumText):
    """Gymnasium's ``FrozenLake-v1``: four by four fields of ice that carries or does not, without slipping."""

    id = "FrozenLake-v1"
    make = {"render_mode": "ansi", "is_slippery": False}  # noqa: RUF012
    actions = ("left", "down", "right", "up")
    goal = "walk from S to G over F and never onto H"
    role = "You cross a frozen lake, one field at a time; you stand where the map is red."
    can_snapshot = True
    max_turns = 20


class Taxi(GymnasiumText):
    """Gymnasium's ``Taxi-v3``: fetch a passenger and bring them to where they want to go."""

    id = "Taxi-v3"
    make = {"render_mode": "ansi"}  # noqa: RUF012
    actions = ("south", "north", "east", "west", "pick up", "drop off")
    goal = "pick the passenger up at the blue letter and drop them off at the magenta one"
    role = "You drive a taxi, yellow while it is empty and green when the passenger is in it."
    max_turns = 60
