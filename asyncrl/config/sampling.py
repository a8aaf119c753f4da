"""How turns are sampled in training and in evaluation."""

from typing import Any

from pydantic import Field, model_validator

from asyncrl.config.base import Strict

DISTORTING = ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


class SamplingConfig(Strict):
    temperature: float = Field(1.0, gt=0)
    """Of training rollouts; above 0, or siblings would be copies and the log-probs trained on would not exist."""
    eval_temperature: float = Field(0.4, ge=0)
    max_tokens: int = Field(512, ge=1)
    """Longest response of one turn."""

    @model_validator(mode="before")
    @classmethod
    def _log_probs_describe_what_was_sampled(cls, data: Any) -> Any:
        if given := [key for key in DISTORTING if isinstance(data, dict) and key in data]:
            raise ValueError(
                f"{', '.join(given)}: refused, because truncated or penalised sampling draws from another distribution "
                "than the one whose log-probs are trained on; leave it out and set temperature, which both sides apply"
            )
        return data
