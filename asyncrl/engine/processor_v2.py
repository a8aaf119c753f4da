"""The adapter for vLLM's V2 model runner, which serves GPUs; nothing in it waits for the device.

Invariants: a row is a turn's next token if and only if it stands at the end of the tokens that the runner has of its
request, so pieces of a prefill are passed over, first and repeated ones. The runner's request numbers are used again:
a step's tokens are committed before another request takes the number of one of its rows.
"""

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcessor, LogitsProcRequestState

from asyncrl.engine.processor import Turns, turn_of
from asyncrl.engine.thinking import SCRAP


class TurnProcessor(Turns, LogitsProcessor):
    def __init__(self, vllm_config: VllmConfig, req_states: LogitsProcRequestState) -> None:
        super().__init__(vllm_config, req_states.device)
        self.core.warm_up(vllm_config.model_config.get_vocab_size())
        self._requests = req_states
        self._keys: list[str | None] = [None] * req_states.max_num_reqs
        """By the runner's number of a request: the turn."""
        self._numbers: dict[str, int] = {}
        self._slots = StagedWriteTensor(req_states.max_num_reqs, dtype=torch.int32, device=req_states.device)
        """By the same number: the core's slot."""
        self._stepped: tuple[Tensor, Tensor] | None = None
        """The last step's rows, until their tokens are committed: request numbers, and where in the sequence."""

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        self.commit()
        key = self._keys[req_idx] = turn_of(sampling_params)
        slot = SCRAP
        if key is not None:
            slot = self.core.admit(key, sampling_params.temperature)
            self._numbers[key] = req_idx
        self._slots.stage_write_elem(req_idx, slot)
        return key is not None

    def apply_staged_writes(self) -> None:
        self._slots.apply_write()

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        self.commit()
        rows, at = ctx.expanded_idx_mapping.long(), ctx.pos.long() + 1
        slots = torch.where(at == self._requests.total_len.gpu[rows], self._slots.gpu[rows], SCRAP).long()
        places = torch.where(slots == SCRAP, 0, at - self._requests.prompt_len.gpu[rows])
        self.core.step(logits, slots, places)
        self._stepped = rows, at
        return logits

    @torch.inference_mode()  # as within a step, for a call that comes between steps too
    def commit(self) -> None:
        if self._stepped is not None:
            (rows, at), self._stepped = self._stepped, None
            tokens = self._requests.all_token_ids.gpu
            found = tokens[rows, at.clamp_max(tokens.shape[1] - 1)].long()
            self.core.commit(torch.where(self._requests.total_len.gpu[rows] > at, found, -1))

    def forget(self, key: str) -> None:
        number = self._numbers.pop(key, None)
        if number is not None and self._keys[number] == key:
            self._keys[number] = None
            self._slots.stage_write_elem(number, SCRAP)
