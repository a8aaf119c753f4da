"""The adapter for vLLM's V1 model runner, which serves the CPU.

Invariant: a row's place is the length of the request's own list of output tokens, which vLLM keeps through moves and
preemptions.
"""

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from asyncrl.engine.processor import Turns, turn_of
from asyncrl.engine.thinking import SCRAP


class TurnProcessor(Turns, LogitsProcessor):
    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        """
        Raises:
            ValueError: asynchronous scheduling: a step begins before the last one's tokens are on the host.
        """
        if vllm_config.scheduler_config.async_scheduling:
            raise ValueError("TurnProcessor needs async_scheduling=False with vLLM's V1 model runner")
        super().__init__(vllm_config, device)
        self._turns: dict[str, tuple[int, list[int]]] = {}
        """Slot, and vLLM's own list of output tokens, which grows as they are sampled."""
        self._rows: dict[int, str] = {}
        self._stepped: list[tuple[list[int], int]] = []
        """The last step's rows, until their tokens are committed: output tokens and place."""

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._rows, batch_update, self._enter)

    def _enter(self, params: SamplingParams, prompt: list[int] | None, tokens: list[int]) -> str | None:
        if (key := turn_of(params)) is not None:
            self._turns[key] = self.core.admit(key, params.temperature), tokens
        return key

    def apply(self, logits: Tensor) -> Tensor:
        self.commit()
        if self._rows:
            turns = [self._turns.get(self._rows.get(row, ""), (SCRAP, [])) for row in range(len(logits))]
            self._stepped = [(tokens, len(tokens)) for _, tokens in turns]
            slots, places = [slot for slot, _ in turns], [place for _, place in self._stepped]
            self.core.step(logits, torch.tensor(slots), torch.tensor(places))
        return logits

    def commit(self) -> None:
        if self._stepped:
            # A row that led to no token was the middle of a prefill, or not ours.
            found = [tokens[place] if len(tokens) > place else -1 for tokens, place in self._stepped]
            self.core.commit(torch.tensor(found))
            self._stepped = []

    def forget(self, key: str) -> None:
        self._turns.pop(key, None)
