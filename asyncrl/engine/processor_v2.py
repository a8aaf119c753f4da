"""The adapter for vLLM's V2 model runner, which serves GPUs; nothing in it waits for the device.

Invariants: a row is a turn's next token if and only if it stands at the end of the tokens that the runner has of its
request, so pieces of a prefill are passed over, first and repeated ones. The runner's request numbers are used again:
a step's tokens are committed before another request takes the number of one of its rows. A step is two CUDA graphs,
before and after its tokens are drawn: the host would take long to issue its many small operations one by one.
"""

from bisect import bisect_left
from typing import NamedTuple

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcessor, LogitsProcRequestState

from asyncrl.engine.processor import Turns, turn_of
from asyncrl.engine.thinking import SCRAP

NOWHERE = -2
"""Where in its sequence a row stands that fills up a batch to a recorded size: one further is no length either."""
STRIDE = 32
"""Between the numbers of rows that are recorded; smaller batches have the powers of 2."""


class Advanced(NamedTuple):
    """What the first half of a step leaves to the second: see :meth:`asyncrl.engine.thinking.Thinking.advance`."""

    log_total: Tensor
    slots: Tensor
    places: Tensor
    forced: tuple[Tensor, Tensor] | None


class Recorded(NamedTuple):
    """A step of some number of rows; each replay overwrites what ``advanced`` holds."""

    advance: torch.cuda.CUDAGraph
    settle: torch.cuda.CUDAGraph
    advanced: Advanced


class TurnProcessor(Turns, LogitsProcessor):
    def __init__(self, vllm_config: VllmConfig, req_states: LogitsProcRequestState) -> None:
        super().__init__(vllm_config, req_states.device)
        self._requests = req_states
        most, device = req_states.max_num_reqs, req_states.device
        self._slots = StagedWriteTensor(most, dtype=torch.int32, device=device)
        """By the runner's number of a request: the core's slot. Written once between two steps: writes race."""
        self._prompts = torch.zeros(most, dtype=torch.int32, device=device)
        """By the same number: the prompt's length. The runner's own lies elsewhere in every step."""
        # Of the last step, by row: request number, where in its sequence, logits as they came.
        self._rows = torch.zeros(most, dtype=torch.int64, device=device)
        self._at = torch.full((most,), NOWHERE, device=device)
        vocab = vllm_config.model_config.get_vocab_size()
        self._logits = torch.zeros(most, vocab, device=device)
        self._pending: Recorded | None = None
        """The last step, until its tokens are committed."""
        self._compiled_advance, self._compiled_settle = torch.compile(self._advance), torch.compile(self._settle)
        self._pool = torch.cuda.graph_pool_handle()
        self._steps: dict[tuple[int, int], Recorded] = {}
        """By number of rows and, whose memory a graph names, of the core's slots. When those grow, the next step of
        each size is recorded again, which its turns wait for; to begin with they are twice the batch."""
        self._sizes = sorted({most, *(2**i for i in range(5) if 2**i < most), *range(STRIDE, most, STRIDE)})
        for size in reversed(self._sizes):  # now, so that no turn waits for it
            self._recorded(size)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        self.commit()
        key = turn_of(sampling_params)
        slot = SCRAP if key is None else self.core.admit(key, sampling_params.temperature)
        self._slots.stage_write_elem(req_idx, slot)
        return key is not None

    def apply_staged_writes(self) -> None:
        self._slots.apply_write()
        self._prompts.copy_(self._requests.prompt_len.gpu)

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        self.commit()
        rows = len(logits)
        size = self._sizes[bisect_left(self._sizes, rows)]  # one row a request: never more than there may be
        self._rows[:rows].copy_(ctx.expanded_idx_mapping)
        self._at[:rows].copy_(ctx.pos)
        self._logits[:rows].copy_(logits)
        if size > rows:
            self._at[rows:size].fill_(NOWHERE)
        step = self._pending = self._recorded(size)
        step.advance.replay()
        if step.advanced.forced is not None:
            ids, values = step.advanced.forced
            logits.scatter_(1, ids[:rows], values[:rows])
        return logits

    def commit(self) -> None:
        if self._pending is not None:
            step, self._pending = self._pending, None
            step.settle.replay()

    def forget(self, key: str) -> None:
        """Nothing is known by the turn's name, and the runner has no more rows of a request that has ended."""

    @torch.inference_mode()
    def _recorded(self, size: int) -> Recorded:
        if (step := self._steps.get((size, self.core.slots))) is None:
            advance, settle = self._compiled_advance, self._compiled_settle
            rows = self._rows[:size], self._at[:size], self._logits[:size]
            for tensor in rows:  # compiled once for any number of rows
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
            settle(*rows, advance(*rows))  # compiles, which cannot be recorded; a step may come twice
            graphs = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[0], self._pool, capture_error_mode="thread_local"):
                advanced = advance(*rows)
            with torch.cuda.graph(graphs[1], self._pool, capture_error_mode="thread_local"):
                settle(*rows, advanced)
            step = self._steps[size, self.core.slots] = Recorded(*graphs, advanced)
        return step

    def _advance(self, rows: Tensor, at: Tensor, logits: Tensor) -> Advanced:
        at = at + 1
        slots = torch.where(at == self._requests.total_len.gpu[rows], self._slots.gpu[rows], SCRAP).long()
        places = torch.where(slots == SCRAP, 0, at - self._prompts[rows])
        log_total, forced = self.core.advance(logits, slots, places)
        return Advanced(log_total, slots, places, forced)

    def _settle(self, rows: Tensor, at: Tensor, logits: Tensor, advanced: Advanced) -> None:
        tokens, at = self._requests.all_token_ids.gpu, at + 1
        found = tokens[rows, at.clamp_max(tokens.shape[1] - 1)].long()
        drawn = torch.where(self._requests.total_len.gpu[rows] > at, found, -1)
        self.core.settle(logits, advanced.log_total, advanced.slots, advanced.places, drawn)
