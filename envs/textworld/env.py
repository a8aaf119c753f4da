"""TextWorld as an environment: collect a coin, find a treasure, cook a meal, in generated games (Côté et al. 2018).

Invariants:

* A task's id is its game, made from nothing else (``generate``) and then kept (``cache``), so ``Task.seed`` changes
  nothing. Making the environment makes no game; the first ``reset`` of a task on a machine does, which takes seconds.
* A snapshot is the interpreter's own state and the world's facts (``engine``), a few kilobytes that are restored in any
  process; nothing is replayed.
* Any string is a legal action. One that is not admissible changes nothing and costs a turn; where the game has an
  answer to it ("You can't go that way."), the agent reads that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from asyncrl.env import Env
from asyncrl.types import Observation, Step, Task
from envs.textworld.cache import find_game, game_folder, require_package
from envs.textworld.tasks import task_ids

if TYPE_CHECKING:
    from envs.textworld.engine import Engine, Saved

MAX_ACTION = 200
"""Characters of an action that are read; the interpreter takes no more, and no admissible command is nearly as long."""


class TextWorld(Env):
    """One TextWorld slot. Task ids are ``"challenge-level-seed"``, e.g. ``"coin_collector-5-17"``.

    Splits are ``train`` and ``test``, those of one challenge (``cooking_train``) and of one level
    (``coin_collector-105_test``). The reward is 1.0 on the step that wins the game and 0 everywhere else; the last
    step's ``info`` has ``success`` and ``score``, the game's points as a share of all there are (0 to 1). Some games
    can be lost (the wrong thing taken, an ingredient spoilt), which ends them.

    Args:
        data: folder that keeps the games, about 0.5 MB each; ``$ASYNCRL_DATA/textworld`` or
            ``~/.cache/asyncrl/textworld`` when None.
        max_turns: turns of an episode.

    Raises:
        ValueError: a bad option, or the package is not installed.
    """

    role: ClassVar[str] = (
        "You are an expert player of TextWorld, a text adventure: you walk between rooms, handle the things in them, "
        "and do what the game asks for."
    )
    max_turns: ClassVar[int] = 50
    can_snapshot: ClassVar[bool] = True

    def __init__(self, data: str | None = None, max_turns: int = 50) -> None:
        if max_turns < 1:
            raise ValueError(f"textworld: max_turns must be at least 1, got {max_turns}")
        require_package()
        self.max_turns = max_turns  # type: ignore[misc]  # the option overrides the class's default for this slot
        self._folder = game_folder(data)
        self._engine: Engine | None = None
        self._task, self._text, self._turns, self._live = Task("textworld", ""), "", 0, False

    @classmethod
    def tasks(cls, split: str) -> Sequence[str]:
        return task_ids(split)

    @classmethod
    def preflight(cls) -> None:
        """Raise ``ValueError`` where the package is missing; imports nothing of it."""
        require_package()

    def reset(self, task: Task) -> Observation:
        engine = self._enter(task)
        self._text, self._turns, self._live = engine.begin(), 0, True
        return self._observe(engine)

    def step(self, action: str) -> Step:
        if not self._live or self._engine is None:
            raise RuntimeError("textworld: the episode is over or was never begun; call reset first")
        engine = self._engine
        self._text = engine.act(action[:MAX_ACTION])
        self._turns += 1
        terminated = engine.won or engine.lost
        truncated = not terminated and self._turns >= self.max_turns
        self._live = not (terminated or truncated)
        info: dict[str, Any] = {}
        if not self._live:
            info = {"success": engine.won, "score": engine.share}
        return Step(self._observe(engine), float(engine.won), terminated, truncated, info)

    def list_actions(self) -> tuple[str, ...]:
        return self._engine.commands() if self._live and self._engine else ()

    def snapshot(self) -> tuple[Task, str, int, bool, Saved]:
        if self._engine is None:
            raise RuntimeError("textworld: there is no episode to copy; call reset first")
        return self._task, self._text, self._turns, self._live, self._engine.save()

    def restore(self, snapshot: tuple[Task, str, int, bool, Saved]) -> Observation:
        task, text, turns, live, saved = snapshot
        engine = self._enter(task)
        engine.load(saved)
        self._text, self._turns, self._live = text, turns, live
        return self._observe(engine)

    def expert(self, task: Task) -> list[str] | None:
        """The game's own walkthrough, or None where it does not win within ``max_turns``; executed to know."""
        self.reset(task)
        assert self._engine is not None
        commands, found = list(self._engine.world.walkthrough), None
        for count, command in enumerate(commands, start=1):
            step = self.step(command)
            if step.done:
                found = commands[:count] if step.info["success"] else None
                break
        self.reset(task)
        return found

    def close(self) -> None:
        self._live, self._engine = False, None

    def _enter(self, task: Task) -> Engine:
        """The engine of a task's game; the one at hand where it is that."""
        from envs.textworld.engine import Engine  # needs packages that a machine without the extra lacks

        if self._engine is None or task.id != self._task.id:
            self._live, self._engine = False, None
            self._engine = Engine(find_game(self._folder, task.id))
        self._task = task
        return self._engine

    def _observe(self, engine: Engine) -> Observation:
        facts = "\n".join(sorted(map(str, engine.facts)))
        anchor = hashlib.blake2b(facts.encode(), digest_size=12).hexdigest()
        return Observation(self._text, engine.world.goal, self.list_actions(), anchor=anchor)
