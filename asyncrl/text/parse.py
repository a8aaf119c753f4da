"""Reading a response: the format validators of SPARK (explore or think), of ReAct (think) and of Search QA.

Invariants: model output is untrusted, so it is matched and cut and never evaluated; every string gets an answer, none
raises; ``valid`` says that the whole format holds, and an invalid response may still carry an action to execute.
Whether the action is admissible is the environment's business and never changes ``valid``.
"""

import re

from asyncrl.config.prompt import Method
from asyncrl.types import Moves, Parsed

CJK = re.compile(r"[\u4e00-\u9fff]")
"""Both releases refuse responses in Chinese characters (a habit of the base models they train)."""
PLACEHOLDER_CHARS = 30
"""ReAct executes the tail of a response without any action block; the environment refuses it."""

_TAGS = ("explore", "think", "action", "search", "answer")
_BLOCKS = {tag: re.compile(rf"<{tag}>(.*?)</{tag}>", re.IGNORECASE | re.DOTALL) for tag in _TAGS}
_REACT_STRICT = re.compile(r"^\s*<think>(.*?)</think>\s*<action>(.*?)</action>\s*$", re.IGNORECASE | re.DOTALL)
_REACT_LOOSE = re.compile(r"<\s*action\s*>(.*?)</\s*action\s*>", re.IGNORECASE | re.DOTALL)
_REACT_TAGS = ("<think>", "</think>", "<action>", "</action>")

SEARCH_MOVE = re.compile(r"<(search|answer)>(.*?)</\1>", re.IGNORECASE | re.DOTALL)


def parse(text: str, method: Method, moves: Moves = "action") -> Parsed:
    """Read one response (tags kept, end token removed)."""
    if moves == "search":
        return _parse_search(text, method)
    return _parse_spark(text) if method == "spark" else _parse_react(text)


def _parse_spark(text: str) -> Parsed:
    """SPARK: one non-empty explore or think block that starts before the one action block; no Chinese.

    The action keeps its case; without exactly one action block it is empty. Any complete explore block triggers
    branching, in valid responses and others alike.
    """
    actions = list(_BLOCKS["action"].finditer(text))
    reasons = [(tag, match) for tag in ("explore", "think") for match in _BLOCKS[tag].finditer(text)]
    single = len(reasons) == 1
    tag, reason = reasons[0] if single else ("", None)
    valid = (
        len(actions) == 1
        and reason is not None
        and bool(reason[1].strip())
        and reason.start() < actions[0].start()
        and not CJK.search(text)
    )
    action = actions[0][1].strip() if len(actions) == 1 else ""
    return Parsed(action, tag, valid, any(found == "explore" for found, _ in reasons), void=not action)


def _parse_search(text: str, method: Method) -> Parsed:
    """Search QA: one search or one answer block; of several, which is invalid, the first search, else the first answer.

    ReAct asks nothing of the reasoning (verl-agent's ``search_projection``); SPARK asks for its one block before it.
    """
    found = [(kind, match[1].strip()) for kind in ("search", "answer") for match in _BLOCKS[kind].finditer(text)]
    kind, body = found[0] if found else ("", "")
    action = f"<{kind}>{body}</{kind}>" if body else ""
    single = bool(action) and len(found) == 1
    if method == "spark":
        # Its validator, told where the move stands as if that were an action.
        parsed = _parse_spark(SEARCH_MOVE.sub("<action>move</action>", text))
        valid = single and parsed.valid and not CJK.search(text)
        return Parsed(action, parsed.tag, valid, bool(_BLOCKS["explore"].search(text)), void=not action)
    tag = "think" if len(_BLOCKS["think"].findall(text)) == 1 else ""
    return Parsed(action, tag, single, explores=False, void=not action)


def _parse_react(text: str) -> Parsed:
    """ReAct: a think block, then an action block, and nothing else; a loose action is executed but not valid."""
    lowered = text.lower()
    strict = _REACT_STRICT.match(text)
    if strict and all(lowered.count(tag) == 1 for tag in _REACT_TAGS) and not CJK.search(text):
        action = strict[2].lower().strip()
        return Parsed(action, "think", valid=True, explores=False, void=not action)
    tag = "think" if len(_BLOCKS["think"].findall(text)) == 1 else ""
    loose = _REACT_LOOSE.search(text)
    action = loose[1].lower().strip() if loose else ""
    return Parsed(action if loose else text[-PLACEHOLDER_CHARS:], tag, valid=False, explores=False, void=not action)
