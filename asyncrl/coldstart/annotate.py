"""Retro-annotation by rule: a reasoning block for every step of a demonstrated trajectory.

Invariants: an annotated step passes its method's validator and keeps the demonstrated action word for word. A step
explores when its verb only moves or looks and the thing that the next handling step is about has not shown up in any
observation so far; such a step names what is sought and where, any other names the move. The rule sees the whole
trajectory, as the papers' teacher does, and knows verbs, not environments.
"""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from asyncrl.config.prompt import Method
from asyncrl.types import Moves, Observation

SEARCH_VERBS = frozenset({"go", "look", "open", "examine", "inspect", "search", "teleport", "read", "enter"})
PREPOSITIONS = frozenset({"in", "into", "to", "on", "onto", "from", "with", "at", "up", "down", "the", "a", "around"})

_TAGS = re.compile(r"</\w+>|[<>]")
"""Search QA's tags; what they leave reads as a verb and what it is about."""


class DemoStep(NamedTuple):
    observation: Observation
    """Before the action."""
    action: str
    slip: bool = False
    """Not the demonstrator's choice; executed, but not trained on."""


def annotate(
    steps: Sequence[DemoStep], method: Method = "spark", hesitates: Callable[[], bool] = bool, moves: Moves = "action"
) -> list[str]:
    """Responses in the format of ``method``, one a step (ReAct has no ``<explore>``: all its steps think).

    ``hesitates``: asked until it says no, whether the reasoning is said once more before the action.
    """
    responses, seen = [], ""
    for i, step in enumerate(steps):
        seen += f" {step.observation.text.lower()}"
        sought, about = _sought(steps[i:]), _object(step.action)
        known = sought and re.search(rf"\b{re.escape(sought)}\b", seen)
        if _verb(step.action) in SEARCH_VERBS and not known:
            tag, reason = "explore", f"seek {sought or 'a clue'} in {about or 'here'}"
        else:
            tag, reason = "think", f"now {_verb(step.action)} {about}".strip()
        tag = tag if method == "spark" else "think"
        said = [reason]
        while hesitates():
            said.append(reason)
        move = f"<action>{step.action}</action>" if moves == "action" else step.action
        responses.append(f"<{tag}>{', '.join(said)}</{tag}>\n{move}")
    return responses


def _verb(action: str) -> str:
    return (_TAGS.sub(" ", action).lower().split() or [""])[0]


def _object(action: str) -> str:
    """What an action is about: the words after its verb, up to the first preposition that follows a noun."""
    words = _TAGS.sub(" ", action).lower().split()[1:]
    while words and words[0] in PREPOSITIONS:
        words = words[1:]
    end = next((i for i, word in enumerate(words) if word in PREPOSITIONS), len(words))
    return " ".join(words[:end])


def _sought(rest: Sequence[DemoStep]) -> str:
    """Object of the first step that handles something, or ``""``."""
    handled = (_object(step.action) for step in rest if _verb(step.action) not in SEARCH_VERBS and not step.slip)
    return next(filter(None, handled), "")
