"""Turns measured and steered inside vLLM's V1 model runner, which serves the CPU: the adapter of ``engine/thinking``.

Invariants: a request takes part if and only if its ``extra_args`` name a turn; a row's place is the length of the
request's own list of output tokens, which vLLM keeps through moves and preemptions. Results leave between steps, any
number of turns in one call.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from asyncrl.config.thinking import ThinkingConfig
from asyncrl.engine.reports import TURN
from asyncrl.engine.thinking import SCRAP, Report, Tag, Thinking


def engine_arguments(config: ThinkingConfig | None, tags: Sequence[Tag] = ()) -> dict[str, Any]:
    """What vLLM's engine arguments need for this; without ``config`` it keeps log-probs only."""
    return {
        "logits_processors": [f"{__name__}:TurnProcessor"],
        "worker_extension_cls": f"{__name__}.TurnWorker",
        "additional_config": {"thinking": config and config.model_dump(), "tags": list(tags)},
    }


class TurnProcessor(LogitsProcessor):
    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        """
        Raises:
            ValueError: asynchronous scheduling: a step begins before the last one's tokens are on the host.
        """
        if vllm_config.scheduler_config.async_scheduling:
            raise ValueError("TurnProcessor needs async_scheduling=False with vLLM's V1 model runner")
        settings: Any = vllm_config.additional_config
        config = settings["thinking"] and ThinkingConfig(**settings["thinking"])
        model = vllm_config.model_config
        self._core = Thinking(config, settings["tags"], model.get_vocab_size(), model.max_model_len, device)
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
        key: str | None = (params.extra_args or {}).get(TURN)
        if key is not None:
            self._turns[key] = self._core.admit(key, params.temperature), tokens
        return key

    def apply(self, logits: Tensor) -> Tensor:
        self._commit()
        if self._rows:
            turns = [self._turns.get(self._rows.get(row, ""), (SCRAP, [])) for row in range(len(logits))]
            self._stepped = [(tokens, len(tokens)) for _, tokens in turns]
            slots, places = [slot for slot, _ in turns], [place for _, place in self._stepped]
            self._core.step(logits, torch.tensor(slots), torch.tensor(places))
        return logits

    def _commit(self) -> None:
        if self._stepped:
            # A row that led to no token was the middle of a prefill, or not ours.
            found = [tokens[place] if len(tokens) > place else -1 for tokens, place in self._stepped]
            self._core.commit(torch.tensor(found))
            self._stepped = []

    def take(self, keys: Sequence[str]) -> list[Report]:
        """Reports of finished turns, in order; their state is dropped.

        Raises:
            KeyError: a key that no request has come with, or that was taken or dropped before.
        """
        self._commit()
        reports = self._core.report({key: len(self._turns[key][1]) for key in keys})
        self.drop(keys)
        return reports

    def drop(self, keys: Sequence[str]) -> None:
        """Forget turns, finished or aborted; unknown keys are passed over."""
        self._commit()
        for key in keys:
            self._turns.pop(key, None)
            self._core.drop(key)


class TurnWorker:
    """What vLLM's worker answers beside its own methods, through ``collective_rpc``: see :class:`TurnProcessor`."""

    model_runner: Any

    def take_turns(self, keys: Sequence[str]) -> list[Report]:
        return self._turn_processor().take(keys)

    def drop_turns(self, keys: Sequence[str]) -> None:
        self._turn_processor().drop(keys)

    def _turn_processor(self) -> TurnProcessor:
        return next(p for p in self.model_runner.input_batch.logitsprocs.all if isinstance(p, TurnProcessor))
