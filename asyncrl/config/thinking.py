"""What the engine measures of a turn while it is generated, and when it cuts its thinking short (T2PO)."""

from typing import Literal

from pydantic import Field, model_validator

from asyncrl.config.base import Strict


class ThinkingConfig(Strict):
    tti: bool = True
    """Cut thinking that no longer changes anything, or has grown too long; off, the signals are only measured."""
    stable: bool = True
    """False leaves ``cap`` as the only rule: a hard thinking budget."""
    alpha: float = Field(0.4, ge=0, le=1)
    """Weight of entropy in M; the rest is confidence's."""
    confidence: Literal["topj", "top1"] = "topj"
    """``topj``: mean negative log-prob of the ``top_j`` likeliest tokens; ``top1``: log-prob of the likeliest (the
    authors' code)."""
    top_j: int = Field(20, ge=1)
    norm: Literal["running", "fixed"] = "running"
    """Scale of H and C within M: what the turn has shown so far, or log V and 1 (the authors' code)."""
    eps: float = Field(1e-4, gt=0)
    """Thinking is cut when M has changed by less than this, on average over the window."""
    window: int = Field(20, ge=1)
    """N: the average runs over N + 1 changes."""
    min_tokens: int = Field(100, ge=1)
    """Tokens of a turn before which thinking is not cut for being stable."""
    cap: int = Field(450, ge=1)
    """Thinking tokens at which it is cut in any case."""
    tail: str = "\n<action>"
    """Text forced after the closing tag; search environments, which have no ``<action>``, take a newline alone."""
    tds: bool = False
    """Sample a turn again while its signal is within ``eta`` of the last turn's: it would repeat it. Never in
    evaluation."""
    eta: float = Field(1e-3, gt=0)
    max_resamples: int = Field(2, ge=1)
    """Times a turn is sampled again; the last sample is kept."""
    series: bool = False
    """Hand back M of every token, for plots."""

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> "ThinkingConfig":
        if self.confidence == "topj" and self.top_j < 2:
            raise ValueError(
                "top_j=1 with confidence=topj: minus the log-prob of the likeliest token alone is high when the policy "
                "is unsure; set top_j to 2 or more, or confidence=top1"
            )
        for name in ("eta", "max_resamples"):
            if not self.tds and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name}: of no effect without tds; set tds=true or leave it out")
        return self
