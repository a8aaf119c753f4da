"""The one user message of a turn: which parts, in which order, under which words.

Invariants:

* A prompt is a pure function of (role, observation, what was seen and done before); the first turn has a variant
  without history, and every later one differs from it only by the history, the step number and the plan line.
* The part order is role, task, history, observation, actions, plan, modes, demand. ``full`` says each part in words;
  ``compact`` keeps the variable parts in the same order and leaves the words out, the role, the history's
  observations, the plan and the instructions with them.
* Text that comes from an environment or from the policy cannot open or close a tag or form a special token:
  :func:`neutralise` breaks both before they enter the message. Reasoning never enters the history.
"""

import re
from collections.abc import Iterable, Sequence

from asyncrl.config.prompt import PromptConfig
from asyncrl.types import Observation

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
        special: the tokenizer's added tokens; those that are not written as markup (``[INST]``) are broken by name.
    """

    def __init__(self, config: PromptConfig, role: str, special: Iterable[str] = ()) -> None:
        self._config, self._role = config, role
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

    def _compact(self, observation: Observation, shown: Numbered, taken: int, list_actions: bool) -> str:
        parts = [observation.goal, "\n".join(action for _, (_, action) in shown), observation.text]
        if list_actions:
            parts.append("\n".join(observation.actions or ()) or observation.action_guide)
        return "\n\n".join(self._clean(part) for part in parts if part)
