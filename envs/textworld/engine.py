"""One TextWorld game as it is played: the story in a Z-machine, and beside it the facts of its world.

Invariants:

* Only a command that the facts allow reaches the world, and the facts change by that command's own rule, if and only if
  the story reports its success: story and facts stay one. For any other command the story is asked, in words of this
  game only, and set back: nothing changes, whatever it did. So no text an agent writes can save, quit, end or trace a
  story, write a file, or do two things at once.
* The admissible commands are a function of the facts alone, and are remembered for each game and its last states.
* A state saved in one process is restored in any other that has the same game: it holds what the interpreter holds
  (memory, stack, registers, random generator) and the facts, as differences to the game's beginning.
"""

import json
import re
import zlib
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import jericho
import numpy as np
from textworld.generator.game import Game
from textworld.logic import Action, Proposition, State, Variable

from envs.textworld.files import StoredGame

SEED = 1
"""Of the interpreter's generator, which would otherwise begin with the time of day; no game draws from it."""
NOTHING_HAPPENS = "Nothing happens."
STATES, WORLDS = 512, 16
"""States of a game whose commands are remembered, and games of a process; a state takes a few tens of kilobytes."""

Facts = frozenset[Proposition]
PlainFact = tuple[str, tuple[tuple[str, str], ...]]
"""A fact as plain strings: TextWorld's own objects keep a hash that is wrong in another process."""


class Saved(NamedTuple):
    """A state: differences to the beginning of the game with this digest."""

    digest: str
    machine: bytes
    """Memory and stack, compressed."""
    registers: tuple[Any, ...]
    facts: tuple[PlainFact, ...]
    """Those that became true or ceased to be."""
    score: int


class World:
    """The rules and first facts of a game; shared by all slots of a process."""

    def __init__(self, text: str) -> None:
        game = Game.deserialize(json.loads(text))
        self.goal = " ".join(game.objective.split())
        self.walkthrough = tuple(game.walkthrough or ())
        self.max_score = int(game.max_score)
        self.first: Facts = frozenset(game.world.state.facts)
        self._logic, self._rules = game.kb.logic, list(game.kb.rules.values())
        self._constants = game.kb.types.constants_mapping
        self._names = {name: info.name for name, info in game.infos.items()}
        spoken = " ".join([*game.command_templates, *(name or "" for name in self._names.values())])
        self._words = set(re.findall(r"[^\s{}]+", spoken.lower()))
        self._verbs = {verb.lower() for verb in game.verbs}
        self.moves = lru_cache(maxsize=STATES)(self._moves)

    def _moves(self, facts: Facts) -> dict[str, Action]:
        """Admissible command, as the agent sees it -> what it does; sorted."""
        state = State(self._logic, sorted(facts))
        found = {
            action.format_command({one.name: self._names[one.name] for one in action.variables}): action
            for action in sorted(state.all_applicable_actions(self._rules, self._constants), key=str)
        }
        return dict(sorted(found.items()))

    def knows(self, command: str) -> bool:
        """Whether a command begins with a verb of this game and holds its words only."""
        words = command.split()
        return bool(words) and words[0] in self._verbs and self._words.issuperset(words)


@lru_cache(maxsize=WORLDS)
def load_world(text: str) -> World:
    return World(text)


class Engine:
    """A game being played."""

    def __init__(self, game: StoredGame) -> None:
        self.world, self._digest = load_world(game.text), game.digest
        self._machine = jericho.FrotzEnv(str(game.story), SEED)
        self._intro = self._machine.reset()[0]
        self._machine.step("tw-trace-actions")  # from here on the story reports what was done, and whether it succeeded
        self._start = self._machine.get_state()
        self.begin()

    def begin(self) -> str:
        """Back to the first state; gives what the agent reads first."""
        self._machine.set_state(self._start)
        self.facts, self.score, self.won, self.lost = self.world.first, 0, False, False
        # The title and the goal stand before the first room; the goal is shown apart.
        return _clean(self._intro[max(self._intro.find("-= "), 0) :])

    @property
    def share(self) -> float:
        """Points as a share of all there are; the story names none with its last word, but a game won has them all."""
        return 1.0 if self.won else self.score / max(self.world.max_score, 1)

    def commands(self) -> tuple[str, ...]:
        """Admissible commands, sorted."""
        return tuple(self.world.moves(self.facts))

    def act(self, command: str) -> str:
        """Execute a command, admissible or not; gives the answer."""
        moves = {name.lower(): action for name, action in self.world.moves(self.facts).items()}
        command = " ".join(command.lower().split())
        if command in moves:
            answer, succeeded = self._ask(command)
            if succeeded:
                action = moves[command]
                self.facts = self.facts - action.removed | action.added
            return answer
        if not self.world.knows(command):
            return NOTHING_HAPPENS
        before = self._machine.get_state(), self.score, self.won, self.lost
        answer, succeeded = self._ask(command)
        state, self.score, self.won, self.lost = before
        self._machine.set_state(state)
        return NOTHING_HAPPENS if succeeded else answer

    def save(self) -> Saved:
        memory, stack, *registers = self._machine.get_state()
        changed = (memory ^ self._start[0]).tobytes() + (stack ^ self._start[1]).tobytes()
        facts = sorted(self.facts ^ self.world.first)
        return Saved(
            self._digest,
            zlib.compress(changed),
            tuple(_plain(one) for one in registers),
            tuple((one.name, tuple((v.name, v.type) for v in one.arguments)) for one in facts),
            self.score,
        )

    def load(self, saved: Saved) -> None:
        """Return to a state of this game.

        Raises:
            ValueError: it is a state of another game, or of this one made by another version of the generator.
        """
        if saved.digest != self._digest:
            raise ValueError("textworld: the snapshot is of another game; were the games made by different versions?")
        changed = np.frombuffer(zlib.decompress(saved.machine), np.uint8)
        memory, stack = self._start[:2]
        self._machine.set_state((memory ^ changed[: memory.size], stack ^ changed[memory.size :], *saved.registers))
        self.facts = self.world.first ^ _facts(saved.facts)
        self.score, self.won, self.lost = saved.score, False, False

    def _ask(self, command: str) -> tuple[str, bool]:
        """The story's answer, and whether it did something."""
        raw = self._machine.step(command)[0]
        self.won, self.lost = "*** The End ***" in raw, "*** You lost! ***" in raw
        if points := re.search(r"-=.*=-(\d+)/\d+\s*$", raw):
            self.score = int(points[1])
        # What one command does on behalf of another is reported with a number in parentheses.
        succeeded = bool(re.search(r"^\[[^]()]* - succeeded\]$", raw, re.MULTILINE)) or self.won or self.lost
        return _clean(raw) or NOTHING_HAPPENS, succeeded


def _clean(raw: str) -> str:
    """A story's text without its prompt, status line and reports."""
    text = re.sub(r"(\n>)?[ ]*-=[^\n]*=-\d+/\d+\s*$", "", raw)
    text = re.sub(r"\[[^]]*\]\n?", "", text)
    text = re.sub(r" *(\*\*\* (The End|You lost!) \*\*\*).*", r"\1", text, flags=re.DOTALL)
    return re.sub(r"\n\s*\n", "\n\n", text).strip()


def _facts(plain: Iterable[PlainFact]) -> Facts:
    return frozenset(Proposition(name, [Variable(*one) for one in arguments]) for name, arguments in plain)


def _plain(value: Any) -> Any:
    """A register without NumPy's wrapping."""
    if isinstance(value, tuple):
        return tuple(map(int, value))
    return value if isinstance(value, bytes) else int(value)
