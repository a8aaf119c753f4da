"""The one user message of a turn: which parts, in which order, under which words.

Invariants:

* A prompt is a pure function of (role, observation, what was seen and done before); the first turn has a variant
  without history, and every later one differs from it only by the history, the step number and the plan line.
* The part order is role, task, history, observation, actions, plan, modes, demand; Search QA has no observation apart
  from its history, no actions and no plan. ``full`` says each part in words;
  ``compact`` keeps the variable parts in the same order and leaves the words out, the role, the history's
  observations, the plan and the instructions with them.
* Text that comes from an environment or from the policy cannot open or close a tag or form a special token:
  :func:`neutralise` breaks both before they enter the message. Reasoning never enters the history.
"""

import re
from collections.abc import Iterable, Sequence

from asyncrl.config.prompt import PromptConfig
from asyncrl.text.parse import SEARCH_MOVE
from asyncrl.types import Moves, Observation

History = Sequence[tuple[Observation, str]]
"""All earlier turns of the trajectory, oldest first: the observation before the action, and the action."""
Numbered = Sequence[tuple[int, tuple[Observation, str]]]
"""Some of them, each with its number."""

_MARKUP = re.compile(r"<(?=[A-Za-z/|!])")

MODES = """\
Before acting, reason in one of two modes:
<explore> ... </explore>: choose it when a result surprises you or you miss information. Open the search up: name as \
many places, objects or actions worth trying as the observations allow.
<think> ... </think>: choose it when all goes as expected. Keep track of what is done and of what comes next.
Pick the mode whose description fits the situation."""

DEMANDS = {
    "spark": """\
Answer with exactly two things:
1. One short sentence of reasoning inside one of the two pairs of tags, <explore> </explore> or <think> </think>.
2. One admissible action inside <action> </action>.""",
    "react": """\
Answer with exactly two things:
1. Your reasoning, step by step, inside <think> </think>.
2. One admissible action inside <action> </action>.""",
}
SEARCH_DEMANDS = {
    method: f"""\
Answer with exactly two things:
1. {demand.splitlines()[1].removeprefix("1. ")}
2. One move. Where knowledge is missing, a query inside <search> </search>; once you are confident, the bare answer \
inside <answer> </answer>, for example <answer> Lake Victoria </answer>."""
    for method, demand in DEMANDS.items()
}
NO_PLAN = "Plan: none yet."


def neutralise(text: str, special: Iterable[str] = ()) -> str:
    """``text`` with every tag and every string of ``special`` broken by a space after its first character."""
    text = _MARKUP.sub("< ", text)
    for token in special:
        text = text.replace(token, f"{token[0]} {token[1:]}")
    return text


class PromptBuilder:
    """Builds the message of a turn.

    Args:
        role: one sentence that says what the agent is and where (``Env.role``).
        moves: how a move is written (``Env.moves``).
        special: the tokenizer's added tokens; those that are not written as markup (``[INST]``) are broken by name.
    """

    def __init__(self, config: PromptConfig, role: str, special: Iterable[str] = (), moves: Moves = "action") -> None:
        self._config, self._role, self._moves = config, role, moves
        self._special = tuple(token for token in special if len(token) > 1 and not _MARKUP.match(token))

    def build(
        self, observation: Observation, past: History = (), *, list_actions: bool = True, with_history: bool = True
    ) -> str:
        """The message.

        Args:
            list_actions: False leaves the admissible actions out (SPARK's cold start).
            with_history: False gives the first-turn variant whatever ``past`` holds (the fallback of a long prompt).
        """
        window = self._config.history if with_history else 0
        shown = list(enumerate(past, start=1))[-window:] if window else []
        if self._moves == "search":
            return self._search(observation, past, shown)
        compose = self._compact if self._config.style == "compact" else self._full
        return compose(observation, shown, len(past), list_actions)

    def _clean(self, text: str) -> str:
        return neutralise(text, self._special)

    def _full(self, observation: Observation, shown: Numbered, taken: int, list_actions: bool) -> str:
        spark, text = self._config.method == "spark", self._clean(observation.text)
        parts = [self._role, f"Your task: {self._clean(observation.goal)}"]
        if shown:
            lines = "\n".join(
                f"[Observation {i}: '{self._clean(seen.text)}', Action {i}: '{self._clean(action)}']"
                for i, (seen, action) in shown
            )
            parts.append(f"Steps taken so far: {taken}. The last {len(shown)} observations and actions:\n{lines}")
            parts.append(f"This is step {taken + 1}. You observe now: {text}")
        else:
            parts.append(f"You observe now: {text}")
        if list_actions and observation.actions is not None:
            listed = "\n ".join(f"'{self._clean(action)}'" for action in observation.actions)
            parts.append(f"Actions admissible now: [{listed}]")
        elif list_actions and observation.action_guide:
            parts.append(f"An action has one of these forms: {self._clean(observation.action_guide)}")
        if spark:
            parts += [NO_PLAN, MODES] if shown else [MODES]
        parts.append(DEMANDS[self._config.method])
        return "\n\n".join(parts)

    def _search(self, observation: Observation, past: History, shown: Numbered) -> str:
        """A question, and for each query what it brought: the observation after it."""
        came = [*(seen.text for seen, _ in past[1:]), observation.text]
        lines = "\n".join(
            f"Step {i}: {self._move(action)} <information>{self._clean(came[i - 1])}</information>"
            for i, (_, action) in shown
        )
        if self._config.style == "compact":
            return "\n\n".join(filter(None, [self._clean(observation.goal), lines]))
        parts = [self._role, f"The question: {self._clean(observation.goal)}"]
        if shown:
            told = "<search> holds a query of yours, <information> what came back for it"
            parts.append(f"Steps taken so far: {len(past)}. In what follows {told}:\n{lines}")
        if self._config.method == "spark":
            parts.append(MODES)
        return "\n\n".join([*parts, SEARCH_DEMANDS[self._config.method]])

    def _move(self, action: str) -> str:
        """A move in its own two tags, with none inside."""
        move = SEARCH_MOVE.fullmatch(action)
        return f"<{move[1]}>{self._clean(move[2])}</{move[1]}>" if move else self._clean(action)

    def _compact(self, observation: Observation, shown: Numbered, taken: int, list_actions: bool) -> str:
        parts = [observation.goal, "\n".join(action for _, (_, action) in shown), observation.text]
        if list_actions:
            parts.append("\n".join(observation.actions or ()) or observation.action_guide)
        return "\n\n".join(self._clean(part) for part in parts if part)
