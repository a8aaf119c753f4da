"""Retro-annotation by rule: a reasoning block for every step of a demonstrated trajectory.

Invariants: an annotated step passes SPARK's validator and keeps the demonstrated action word for word; a step is
``explore`` when it searches, that is when its verb only moves or looks and the thing that the next manipulating step
handles has not shown up in any observation so far; else it is ``think``. One short sentence names the candidates or
the next move. The rule knows verbs, not environments.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from asyncrl.types import Observation

SEARCH_VERBS = frozenset({"go", "goto", "look", "open", "examine", "inspect", "search", "teleport", "read", "enter"})
PREPOSITIONS = frozenset({"in", "into", "to", "on", "onto", "from", "with", "using", "at", "up", "down", "the", "a", "around"})
CANDIDATES = 2
"""Places or objects that an explore sentence names."""


class DemoStep(NamedTuple):
    observation: Observation
    """Before the action."""
    action: str


def annotate(steps: Sequence[DemoStep]) -> list[str]:
    """Responses in SPARK's format, one a step."""
    responses, seen = [], ""
    for i, step in enumerate(steps):
        seen += f" {step.observation.text.lower()}"
        sought = _sought(steps[i:])
        if _verb(step.action) in SEARCH_VERBS and not (sought and _mentions(seen, sought)):
            reason = f"<explore>{' or '.join(_candidates(step))}?</explore>"
        else:
            reason = f"<think>now {_verb(step.action)}</think>"
        responses.append(f"{reason}\n<action>{step.action}</action>")
    return responses


def _verb(action: str) -> str:
    return (action.lower().split() or [""])[0]


def _object(action: str) -> str:
    """What an action is about: its words from the first noun up to the next preposition."""
    words = action.lower().split()[1:]
    while words and words[0] in PREPOSITIONS:
        words = words[1:]
    end = next((i for i, word in enumerate(words) if word in PREPOSITIONS), len(words))
    return " ".join(words[:end])


def _sought(rest: Iterable[DemoStep]) -> str:
    """Object of the first step that is not a searching one, or ``""``."""
    return next((_object(step.action) for step in rest if _verb(step.action) not in SEARCH_VERBS), "")


def _mentions(text: str, thing: str) -> bool:
    return re.search(rf"\b{re.escape(thing)}\b", text) is not None


def _candidates(step: DemoStep) -> list[str]:
    """The place chosen, then others that the admissible actions offer to the same verb."""
    others = [a for a in step.observation.actions or () if _verb(a) == _verb(step.action) and a != step.action]
    named = [_object(action) or action for action in (step.action, *others)]
    return list(dict.fromkeys(named))[:CANDIDATES]
