"""From a turn's message to token ids and from sampled ids to text, each exactly once.

Invariants: the ids returned here are what the engine is given and what the learner trains on; nothing downstream
tokenises again. A prompt never exceeds ``prompt.max_prompt_tokens``.
"""

from collections.abc import Sequence
from typing import Any

from asyncrl.config.prompt import PromptConfig
from asyncrl.text.message import History, PromptBuilder
from asyncrl.types import Moves, Observation


class PromptTooLong(ValueError):
    """Even without history the prompt exceeds the limit; the trajectory ends here."""


class PromptEncoder:
    """Prompt builder and tokenizer of one run: any of Hugging Face's that has a chat template and an end token."""

    def __init__(self, tokenizer: Any, config: PromptConfig, role: str, moves: Moves = "action") -> None:
        self._tokenizer, self._limit, self.moves = tokenizer, config.max_prompt_tokens, moves
        self._builder = PromptBuilder(config, role, tokenizer.get_added_vocab(), moves)

    def encode(self, observation: Observation, past: History = (), *, list_actions: bool = True) -> list[int]:
        """Prompt ids of the next turn: one user message in the model's chat template, ready for the response to follow.

        Args:
            past: (observation, action) of all earlier turns, oldest first.
            list_actions: False leaves the admissible actions out (SPARK's cold start).

        Raises PromptTooLong: longer than ``max_prompt_tokens`` with and without history.
        """
        length = 0
        for with_history in (True, False):
            message = self._builder.build(observation, past, list_actions=list_actions, with_history=with_history)
            ids = self._tokenizer.apply_chat_template(
                [{"role": "user", "content": message}], add_generation_prompt=True, tokenize=True, return_dict=False
            )
            if (length := len(ids)) <= self._limit:
                return list(ids)
        raise PromptTooLong(
            f"the prompt of turn {len(past) + 1} has {length} tokens even without history; "
            f"prompt.max_prompt_tokens is {self._limit}"
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a response without its end token; every other special token stays visible."""
        ids = list(token_ids)
        if ids and ids[-1] == self._tokenizer.eos_token_id:
            ids.pop()
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def encode_response(self, text: str) -> list[int]:
        """Ids of a demonstrated response, end token included."""
        return [*self._tokenizer.encode(text, add_special_tokens=False), self._tokenizer.eos_token_id]
