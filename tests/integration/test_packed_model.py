"""Rows laid end to end, through a model: they are what they would be alone."""

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from asyncrl.learner import attention
from asyncrl.learner.batch import PADDING, Row, pack
from asyncrl.learner.policy import logprobs
from tests.tiny_qwen import tiny_qwen

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    return tiny_qwen(vocab_size=60)


def test_packed_equals_unpacked(model: Qwen3ForCausalLM) -> None:
    rng = np.random.default_rng(1)
    rows = [
        Row(tuple(rng.integers(1, 60, size=int(p))), tuple(rng.integers(1, 60, size=int(r))))
        for p, r in ((9, 3), (1, 1), (20, 7), (5, 0), (2, 12))
    ]
    temperature = 0.7
    model.set_attn_implementation("sdpa")
    expected, entropies = [], []
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor([[*row.prompt_ids, *row.response_ids]])
            table = (model(input_ids=ids).logits[0] / temperature).log_softmax(-1)[len(row.prompt_ids) - 1 : -1]
            expected += [table[i, token].item() for i, token in enumerate(row.response_ids)]
            entropies += (-(table.exp() * table).sum(-1)).tolist()[: len(row.response_ids)]
    model.set_attn_implementation(attention.register())
    with torch.no_grad():
        got, entropy = logprobs(model, pack(rows), temperature)
    torch.testing.assert_close(got, torch.tensor(expected), rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy, torch.tensor(entropies), rtol=0, atol=1e-5)


def test_neighbours_leave_a_row_and_its_gradient_alone(model: Qwen3ForCausalLM) -> None:
    model.set_attn_implementation(attention.register())
    row = Row((3, 1, 4), (1, 5))

    def gradient(*rows: Row) -> torch.Tensor:
        model.zero_grad()
        packed = pack(rows)
        logprobs(model, packed, 1.0)[0][packed.row == 1].sum().backward()
        return model.model.layers[0].self_attn.q_proj.weight.grad.clone()

    alone = gradient(PADDING, row)
    crowded = gradient(Row((9,) * 17, (2,) * 9), row, PADDING)
    torch.testing.assert_close(alone, crowded, rtol=1e-5, atol=1e-7)


def test_entropy_gradient_only_on_request(model: Qwen3ForCausalLM) -> None:
    model.set_attn_implementation(attention.register())
    packed = pack([Row((3, 1), (4, 1))])
    assert not logprobs(model, packed, 1.0)[1].requires_grad
    assert logprobs(model, packed, 1.0, entropy_grad=True)[1].requires_grad
