"""Turns measured and steered while they are generated: the tensor core behind the engine's logits processors.

Invariants:

* State is per turn, under the caller's key: the turn's row in the batch, its neighbours and absences change nothing.
* What is kept is indexed by a token's place in the response, and a decision at place t looks only at places before t
  and at the row itself. So a row may come again (partial prefill, preemption, a token thrown away): the last one
  counts, and place 0 begins the turn afresh.
* Only :meth:`Readback.get` waits for the device: elsewhere no shape and no branch depends on a value there, so steps
  may be recorded as CUDA graphs, which hold as long as :attr:`Thinking.slots` does.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from asyncrl.algo.uncertainty import BRANCH_TOKENS, fixed, running, token_signals, turn, turn_signal
from asyncrl.config.thinking import ThinkingConfig
from asyncrl.types import Signals

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SCRAP = 0
"""The slot of rows that are not a turn's next token; written to, never read."""
NEVER = 2**31 - 1
FORCED_LOGIT = 1e9
"""Beside it every other token's probability is exactly 0 in float32."""
RULES = ("", "stable", "cap")
REASONING = ("think", "explore")
"""Tags that a response may think in; the second is SPARK's."""
M, LOGPROB = 2, 4
"""Of what is kept by slot and place: H, C, M, the top tokens' entropy, the sampled token's log-prob."""
TAG, OPENED, CLOSED, CLOSER, FIRED, RULE = range(6)
"""Of a slot's state: the tag thought in; after how many tokens thinking opened, closed, was cut; tokens in the closer;
the rule that cut it."""


class Tag(NamedTuple):
    """A reasoning tag in the tokenizer's ids; a pattern lists the ids allowed at each of its tokens."""

    opener: list[list[int]]
    closer: list[list[int]]
    queue: list[int]
    """Forced when thinking inside this tag is cut: the closer, then the environment's tail."""


def reasoning_tags(tokenizer: "PreTrainedTokenizerBase", names: Sequence[str], tail: str) -> list[Tag]:
    """Tags a response may think in; the first, ``think``, is the one to close when none is open.

    Raises:
        ValueError: the first is not a token of its own, or ``tail`` does not survive the tokenizer.
    """

    def pattern(tag: str) -> list[list[int]]:
        if len(ids := tokenizer.encode(tag, add_special_tokens=False)) == 1:
            return [ids]
        # In pieces, the first may have merged with what comes before (".</") and the last with what follows (">\n").
        first, *rest = tokenizer.encode(tag[:-1], add_special_tokens=False)
        end = str(tokenizer.convert_ids_to_tokens(first))
        return [[id for token, id in tokenizer.get_vocab().items() if token.endswith(end)], *([id] for id in rest)]

    tags = []
    for name in names:
        queue = tokenizer.encode(f"</{name}>{tail}", add_special_tokens=False)
        if tokenizer.decode(queue, skip_special_tokens=False) != f"</{name}>{tail}":
            raise ValueError(f"thinking.tail {tail!r}: the tokenizer cannot encode it after </{name}>; change the tail")
        tags.append(Tag(pattern(f"<{name}>"), pattern(f"</{name}>"), queue))
    if len(tags[0].opener) + len(tags[0].closer) > 2:
        raise ValueError(f"thinking.tti: <{names[0]}> and its closer must be single tokens of the model's tokenizer")
    return tags


class Report(NamedTuple):
    """What a turn leaves behind."""

    logprobs: list[float]
    """Of each token under the whole distribution it was drawn from; 0 for forced tokens, which were not drawn."""
    signals: Signals | None = None
    """None where only log-probs are kept."""


class Readback:
    """Reports on their way from the device: one transfer for all of them, which the engine's steps do not wait for."""

    def __init__(self, packed: Tensor, lengths: Mapping[str, int], measured: bool, series: bool) -> None:
        """``packed``: by turn, log-probs up to the longest turn's length, then the signals if ``measured``."""
        self._packed, self._lengths, self._measured, self._series = packed, dict(lengths), measured, series
        self._arrived: torch.cuda.Event | None = None
        if packed.device.type == "cuda":
            self._packed = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._packed.copy_(packed, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def ready(self) -> bool:
        """Whether :meth:`get` need not wait."""
        return self._arrived is None or self._arrived.query()

    def get(self) -> dict[str, Report]:
        if self._arrived is not None:
            self._arrived.synchronize()
        longest = max(self._lengths.values())
        reports = {}
        for (key, length), row in zip(self._lengths.items(), self._packed.tolist(), strict=True):
            signals = None
            if self._measured:
                phi, entropy, confidence, top, *whole = row[longest : longest + 8]
                thinking, number, start, stop = map(int, whole)
                forced = (start, stop) if number else (0, 0)
                m = row[longest + 8 :][:length] if self._series else None
                signals = Signals(phi, entropy, confidence, top, thinking, RULES[number], forced, m)
            reports[key] = Report(row[:length], signals)
        return reports


class Thinking:
    """
    Args:
        config: None keeps log-probs and nothing else.
        tags: see :func:`reasoning_tags`.
        max_tokens: longest response.
        slots: turns at once, to begin with; their number grows.
    """

    def __init__(
        self,
        config: ThinkingConfig | None,
        tags: Sequence[Tag],
        vocab: int,
        max_tokens: int,
        device: torch.device,
        slots: int = 64,
    ) -> None:
        def table(ids: list[int]) -> Tensor:
            return torch.zeros(vocab, dtype=torch.bool).index_fill(0, torch.tensor(ids), True).to(device)

        self._config, self._device = config, device
        self._patterns = [[[table(ids) for ids in pattern] for pattern in tag[:2]] for tag in tags]
        queues = [torch.tensor(tag.queue, device=device) for tag in tags]
        self._queue_length = torch.tensor([len(queue) for queue in queues], device=device)
        self._queues = pad_sequence(queues, batch_first=True) if queues else self._queue_length
        self._fresh = torch.tensor([0, 0, NEVER, 0, NEVER, 0], device=device)
        # By slot and place; ``extremes`` at place t are over the tokens before it.
        self._values = torch.zeros(slots, max_tokens, 5, device=device)
        measured = slots if config else 0
        self._extremes = torch.zeros(measured, max_tokens + 1, 4, device=device)
        self._tokens = torch.zeros(measured, max_tokens, dtype=torch.int64, device=device)
        # By slot.
        self._temperature = torch.ones(slots, device=device)
        self._state = torch.zeros(slots, len(self._fresh), dtype=torch.int64, device=device)
        self._slot_of: dict[str, int] = {}
        self._free = list(range(SCRAP + 1, slots))
        self._rows: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
        """Of the last step, until its tokens are known: what :meth:`settle` takes."""

    def __contains__(self, key: str) -> bool:
        return key in self._slot_of

    @property
    def slots(self) -> int:
        """Their number, which grows when more turns are there at once than ever before."""
        return len(self._state)

    @torch.inference_mode()
    def admit(self, key: str, temperature: float) -> int:
        """Slot of the turn ``key``: the one it had, or a new one. Temperature 0 (greedy) has its log-probs at 1."""
        if key not in self._slot_of:
            if not self._free:
                self._free = list(range(len(self._state), 2 * len(self._state)))
                for name in ("_values", "_extremes", "_tokens", "_temperature", "_state"):
                    setattr(self, name, torch.cat([getattr(self, name)] * 2))
            slot = self._slot_of[key] = self._free.pop()
            self._temperature[slot] = temperature or 1.0
        return self._slot_of[key]

    def drop(self, key: str) -> None:
        """Forget a turn, all of whose tokens are committed; unknown keys are passed over."""
        if (slot := self._slot_of.pop(key, None)) is not None:
            self._free.append(slot)

    @torch.inference_mode()
    def step(self, logits: Tensor, slots: Tensor, places: Tensor) -> None:
        """One step of a batch: what :meth:`advance` does, and the logits overwritten where a token is forced."""
        kept = logits.clone()  # the engine goes on to overwrite its own
        log_total, forced = self.advance(kept, slots, places)
        self._rows = kept, log_total, slots, places
        if forced is not None:
            logits.scatter_(1, *forced)

    @torch.inference_mode()
    def commit(self, tokens: Tensor) -> None:
        """The tokens (rows,) that the last step's rows led to; -1 for none."""
        assert self._rows is not None, "commit() comes once after each step()"
        rows, self._rows = self._rows, None
        self.settle(*rows, tokens)

    def advance(self, logits: Tensor, slots: Tensor, places: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """The first half of a step, before its tokens are drawn.

        Args:
            logits: (rows, V), raw.
            slots: (rows,) from :meth:`admit`, or ``SCRAP``.
            places: (rows,) tokens that the turn has so far; 0 for ``SCRAP``.

        Returns:
            log-sum-exp (rows,) of the logits over their temperature and, with TTI, one id a row (rows, 1) and the logit
            to give it: its own, or ``FORCED_LOGIT``.
        """
        log_total = (logits.float() / self._temperature[slots, None]).logsumexp(-1)
        if (config := self._config) is None:
            return log_total, None
        first = places[:, None] == 0
        signals = token_signals(logits, config.top_j if config.confidence == "topj" else None)
        before = torch.where(first, torch.inf, self._extremes[slots, places])
        m, self._extremes[slots, places + 1] = running(signals.entropy, signals.confidence, before, config.alpha)
        if config.norm == "fixed":
            m = fixed(signals.entropy, signals.p_max, logits.shape[-1], config.alpha)
        kept = torch.stack([signals.entropy, signals.confidence, m, signals.top_entropy], -1)
        self._values[slots, places, :LOGPROB] = kept
        state = torch.where(first, self._fresh, self._state[slots])
        forced = None
        if config.tti:
            due, ids = self._intervene(config, state, slots, places)
            forced = ids, torch.where(due, FORCED_LOGIT, logits.gather(1, ids))
        self._state[slots] = state
        return log_total, forced

    def _intervene(self, config: ThinkingConfig, state: Tensor, slots: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Fire where thinking is open and nothing fired before. Returns, both (rows, 1), whether this place's token is
        forced, and which the queue holds for it."""
        recent = (places[:, None] + torch.arange(-config.window - 1, 1, device=self._device)).clamp_min(0)
        change = self._values[slots[:, None], recent, M].diff(dim=-1).abs().mean(-1)
        settled = (places >= max(config.min_tokens, config.window + 1)) & (change < config.eps)
        stable = settled & config.stable
        fires = (stable | (places - state[:, OPENED] >= config.cap)) & (state[:, CLOSED] > places)
        before = state[:, FIRED] < places
        state[:, RULE] = torch.where(before, state[:, RULE], fires * torch.where(stable, 1, 2))
        state[:, FIRED] = torch.where(before, state[:, FIRED], torch.where(fires, places, NEVER))
        since = places - state[:, FIRED]
        forced = (since >= 0) & (since < self._queue_length[state[:, TAG]])
        return forced[:, None], self._queues[state[:, TAG], since.clamp(0, self._queues.shape[1] - 1)][:, None]

    def settle(self, logits: Tensor, log_total: Tensor, slots: Tensor, places: Tensor, tokens: Tensor) -> None:
        """The second half: what :meth:`advance` took and returned, and the tokens (rows,) drawn; -1 for none."""
        slots, tokens = torch.where(tokens >= 0, slots, SCRAP), tokens.clamp_min(0)
        drawn = logits.gather(1, tokens[:, None])[:, 0].float() / self._temperature[slots]
        self._values[slots, places, LOGPROB] = drawn - log_total
        if self._config is None:
            return
        self._tokens[slots, places] = tokens
        state = self._state[slots]
        # Marks beyond this place were left by tokens thrown away since.
        opened = torch.where(state[:, OPENED] > places, 0, state[:, OPENED])
        closed = torch.where(state[:, CLOSED] > places, NEVER, state[:, CLOSED])
        for tag, (opener, closer) in enumerate(self._patterns):
            opens, closes = ((closed == NEVER) & self._shows(p, slots, places) for p in (opener, closer))
            state[:, TAG] = torch.where(opens, tag, state[:, TAG])
            opened = torch.where(opens, places + 1, opened)
            closed = torch.where(closes, places + 1, closed)
            state[:, CLOSER] = torch.where(closes, len(closer), state[:, CLOSER])
        state[:, OPENED], state[:, CLOSED] = opened, closed
        self._state[slots] = state

    def _shows(self, pattern: list[Tensor], slots: Tensor, places: Tensor) -> Tensor:
        """Whether the tokens up to and with ``places`` end in the pattern."""
        begin = places - len(pattern) + 1
        shown = begin >= 0
        for offset, allowed in enumerate(pattern):
            shown = shown & allowed[self._tokens[slots, (begin + offset).clamp_min(0)]]
        return shown

    @torch.inference_mode()
    def report(self, lengths: Mapping[str, int]) -> Readback:
        """What turns leave behind, by key with their numbers of tokens, all committed; they may be dropped after that.

        Raises:
            KeyError: a key that was never admitted, or has been dropped.
        """
        slots = self._upload([self._slot_of[key] for key in lengths])
        length = self._upload(list(lengths.values()))[:, None]
        place = torch.arange(max(lengths.values()), device=self._device)
        h, c, m, top, logprob = self._values[slots, : len(place)].unbind(-1)
        if self._config is None:
            return Readback(logprob, lengths, measured=False, series=False)
        tag, opened, closed, closer, fired, rule = self._state[slots].split(1, -1)
        end = torch.minimum(fired + self._queue_length[tag], length)
        sampled = (place < length) & ~((place >= fired) & (place < end))
        phi = turn_signal(turn(h, c, sampled, self._config.alpha), sampled)[:, None]
        of_mean = (h, sampled), (c, sampled), (top, sampled & (place < BRANCH_TOKENS))
        means = [torch.where(mask, value, torch.nan).nanmean(-1, keepdim=True) for value, mask in of_mean]
        thinking = torch.where(closed <= length, closed - closer, length) - opened
        whole = [thinking, torch.where(fired < length, rule, 0), fired, end]
        packed = torch.cat([torch.where(sampled, logprob, 0.0), phi, *means, *whole, m], 1)
        return Readback(packed, lengths, measured=True, series=self._config.series)

    def _upload(self, values: list[int]) -> Tensor:
        host = torch.tensor(values)
        return host.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else host
