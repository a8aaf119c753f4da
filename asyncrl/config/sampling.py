"""How turns are sampled in training and in evaluation."""

from pydantic import Field

from asyncrl.config.base import Strict


class SamplingConfig(Strict):
    temperature: float = Field(1.0, gt=0)
    """Of training rollouts; above 0, or siblings would be copies and the log-probs trained on would not exist."""
    eval_temperature: float = Field(0.4, ge=0)
    max_tokens: int = Field(512, ge=1)
    """Longest response of one turn."""
