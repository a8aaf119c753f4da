"""Log-probabilities of a packed micro-batch's response tokens.

Invariants: logits exist for response tokens only; log-probs and entropies are float32 whatever the model's type and
refer to the distribution at the given temperature, which is the one the tokens were sampled from.
"""

import torch
from torch import Tensor, nn

from asyncrl.learner.batch import Packed


def logprobs(model: nn.Module, packed: Packed, temperature: float, entropy_grad: bool = False) -> tuple[Tensor, Tensor]:
    """Log-prob of each response token and entropy of the distribution it came from, both (T,) float32, in nats.

    The entropy carries a gradient only with ``entropy_grad``: it costs a second pass over the vocabulary.
    """
    out = model(
        input_ids=packed.input_ids,
        position_ids=packed.position_ids,
        logits_to_keep=packed.at - 1,
        index=packed.index,
        use_cache=False,
    )
    logits = out.logits[0].float() / temperature
    normaliser = logits.logsumexp(-1)
    chosen = logits.gather(-1, packed.targets[:, None])[:, 0] - normaliser
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        shares = (logits - normaliser[:, None]).exp()
        entropy = normaliser - (shares * logits).sum(-1)
    return chosen, entropy
