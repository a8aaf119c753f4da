"""The V1 adapter, driven as vLLM's persistent batch drives it, against the tensor core run one turn at a time."""

import random
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality

from asyncrl.config.thinking import ThinkingConfig
from asyncrl.engine.processor import engine_arguments
from asyncrl.engine.processor_v1 import TurnProcessor
from asyncrl.engine.reports import TURN
from asyncrl.engine.thinking import Report, Tag, Thinking

pytestmark = pytest.mark.integration

VOCAB, LENGTH = 16, 14
CONFIG = ThinkingConfig(window=2, min_tokens=4, cap=9, top_j=4, series=True)
TAGS = [Tag([[0]], [[1]], [1, 2])]


def processor(asynchronous: bool = False) -> TurnProcessor:
    config: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(async_scheduling=asynchronous, max_num_seqs=2),
        additional_config=engine_arguments(CONFIG, TAGS)["additional_config"],
        model_config=SimpleNamespace(get_vocab_size=lambda: VOCAB, max_model_len=LENGTH),
    )
    return TurnProcessor(config, torch.device("cpu"), False)


def logits_of(turn: int, place: int) -> torch.Tensor:
    """Settled from a place of the turn's own on."""
    source = np.random.default_rng([turn, min(place, turn % 7)])
    return torch.tensor(source.normal(0, 3, VOCAB), dtype=torch.float32)


def alone(turn: int) -> tuple[list[int], Report]:
    core, tokens = Thinking(CONFIG, TAGS, VOCAB, LENGTH, torch.device("cpu")), []
    slot = torch.tensor([core.admit("k", 1.0)])
    for place in range(LENGTH):
        logits = logits_of(turn, place)[None]
        core.step(logits, slot, torch.tensor([place]))
        tokens.append(int(logits.argmax()))
        core.commit(torch.tensor(tokens[-1:]))
    return tokens, core.report({"k": LENGTH}).get()["k"]


class Batch:
    """vLLM's persistent batch: freed rows are filled by newcomers, then from the end; rows may be swapped."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.tokens: dict[int, list[int]] = defaultdict(list)

    def update(self, wanted: list[int], chance: random.Random) -> BatchUpdate | None:
        free = sorted(row for row, turn in enumerate(self.rows) if turn not in wanted)
        before, added, moved = list(self.rows), [], []
        for turn in wanted:
            if turn in before:
                continue
            row = free.pop(0) if free else len(self.rows)
            self.rows[row : row + 1] = [turn]
            extra = {"extra_args": {TURN: f"turn-{turn}"}} if turn >= 0 else {}
            added.append((row, SamplingParams(**extra), None, self.tokens[turn]))
        for row in list(free):
            while self.rows and self.rows[-1] not in wanted:
                self.rows.pop()
            if row < len(self.rows):
                moved.append((len(self.rows) - 1, row, MoveDirectionality.UNIDIRECTIONAL))
                self.rows[row] = self.rows.pop()
        if len(self.rows) > 1 and chance.random() < 0.4:
            a, b = chance.sample(range(len(self.rows)), 2)
            self.rows[a], self.rows[b] = self.rows[b], self.rows[a]
            moved.append((a, b, MoveDirectionality.SWAP))
        return BatchUpdate(len(self.rows), free, added, moved) if free or added or moved else None


@settings(max_examples=20)
@given(st.lists(st.integers(0, 10**6), min_size=2, max_size=6, unique=True), st.integers(0, 10**6))
def test_moves_removals_and_readmissions_change_nothing(turns, seed):
    chance, batch, found = random.Random(seed), Batch(), processor()
    exact, waiting = {turn: alone(turn) for turn in turns}, list(turns)
    while waiting:
        wanted = [turn for turn in waiting if chance.random() < 0.8] + [-1] * (chance.random() < 0.3)
        found.update_state(batch.update(wanted, chance))
        assert sorted(batch.rows) == sorted(wanted)
        if not wanted:
            continue
        logits = torch.stack([logits_of(abs(turn), len(batch.tokens[turn])) for turn in batch.rows])
        assert found.apply(logits) is logits
        for turn, row in zip(batch.rows, logits, strict=True):
            if chance.random() < 0.8:  # else the row was the middle of a prefill
                batch.tokens[turn].append(int(row.argmax()))
        logits.zero_()
        done = [turn for turn in waiting if len(batch.tokens[turn]) == LENGTH]
        if done and chance.random() < 0.9:
            reports = found.take({f"turn-{turn}": LENGTH for turn in done})
            assert {turn: (batch.tokens[turn], reports[f"turn-{turn}"]) for turn in done} == {t: exact[t] for t in done}
            waiting = [turn for turn in waiting if turn not in done]
        elif done:  # aborted, though it was complete
            found.drop([f"turn-{turn}" for turn in done])
            waiting = [turn for turn in waiting if turn not in done]
            assert found.take({f"turn-{done[0]}": LENGTH}) == {f"turn-{done[0]}": None}


def test_asynchronous_scheduling_is_refused():
    with pytest.raises(ValueError, match="async_scheduling=False"):
        processor(asynchronous=True)
