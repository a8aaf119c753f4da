"""Held-out evaluation."""

from pydantic import Field

from asyncrl.config.base import Strict


class EvalConfig(Strict):
    tasks: int | None = Field(None, ge=1)
    """Tasks of the test split, from its start; None takes all."""
    episodes: int = Field(1, ge=1)
    """Episodes a task."""
