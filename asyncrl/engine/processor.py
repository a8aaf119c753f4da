"""Turns measured and steered inside vLLM: what its two model runners have in common.

V1 serves the CPU, V2 serves GPUs, and each has its own interface for logits processors: ``processor_v1``,
``processor_v2``. Both are thin adapters of ``engine/thinking``, which holds the state.

Invariants: a request takes part if and only if its ``extra_args`` name a turn; results leave between steps, any number
of turns in one call, when the front end has the turn's tokens already and so knows how many there are; a call does not
wait for the device, so what it asks for may come with a later one.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import VllmConfig

from asyncrl.config.thinking import ThinkingConfig
from asyncrl.engine.reports import TURN
from asyncrl.engine.thinking import Readback, Report, Tag, Thinking


def engine_arguments(config: ThinkingConfig | None, tags: Sequence[Tag] = (), gpu: bool = False) -> dict[str, Any]:
    """What vLLM's engine arguments need for this; without ``config`` it keeps log-probs only."""
    return {
        "logits_processors": [f"asyncrl.engine.processor_v{2 if gpu else 1}:TurnProcessor"],
        "worker_extension_cls": f"{__name__}.TurnWorker",
        "additional_config": {"thinking": config and config.model_dump(), "tags": list(tags)},
        # V1 would begin a step before the last one's tokens are known to the host, where they are read.
        "async_scheduling": gpu,
    }


class Turns(ABC):
    """What a worker's logits processor answers for; ``core`` holds the turns."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        settings: Any = vllm_config.additional_config
        config = settings["thinking"] and ThinkingConfig(**settings["thinking"])
        model = vllm_config.model_config
        vocab, longest = model.get_vocab_size(), model.max_model_len
        # Finished turns keep theirs until they are fetched.
        slots = 2 * vllm_config.scheduler_config.max_num_seqs + 1
        self.core = Thinking(config, settings["tags"], vocab, longest, device, slots)
        self._coming: deque[Readback] = deque()

    @abstractmethod
    def commit(self) -> None:
        """Hand the core the tokens of the last step, once."""

    @abstractmethod
    def forget(self, key: str) -> None:
        """Write nothing more to the slot of ``key``."""

    def take(self, lengths: Mapping[str, int]) -> dict[str, Report | None]:
        """Begin to fetch the reports of finished turns, given with their numbers of tokens, and forget the turns.

        Returns the reports that are there, of this call's turns and of earlier ones'; None for an unknown turn.
        """
        self.commit()
        known = {key: length for key, length in lengths.items() if key in self.core}
        if known:
            self._coming.append(self.core.report(known))
            self.drop(known)
        found: dict[str, Report | None] = dict.fromkeys(lengths.keys() - known)
        while self._coming and self._coming[0].ready():
            found |= self._coming.popleft().get()
        return found

    def drop(self, keys: Iterable[str]) -> None:
        """Forget turns, finished or aborted; unknown keys are passed over."""
        self.commit()
        for key in keys:
            self.forget(key)
            self.core.drop(key)


class TurnWorker:
    """What vLLM's worker answers beside its own methods, through ``collective_rpc``: see :class:`Turns`."""

    model_runner: Any

    def take_turns(self, lengths: Mapping[str, int]) -> dict[str, Report | None]:
        return self._turns().take(lengths)

    def drop_turns(self, keys: Sequence[str]) -> None:
        self._turns().drop(keys)

    def _turns(self) -> Turns:
        runner = self.model_runner
        v1 = hasattr(runner, "input_batch")
        processors = runner.input_batch.logitsprocs.all if v1 else runner.sampler.logits_processors
        return next(processor for processor in processors if isinstance(processor, Turns))


def turn_of(params: SamplingParams) -> str | None:
    """The turn's name, of a request that takes part."""
    return (params.extra_args or {}).get(TURN)
