"""The supervised cold start."""

from typing import Any

from pydantic import Field

from asyncrl.config.base import Strict


class SftConfig(Strict):
    trajectories: int = Field(300, ge=1)
    """Expert trajectories."""
    epochs: int = Field(3, ge=1)
    batch_rows: int = Field(32, ge=1)
    """Rows (turns) of one optimizer step."""
    lr: float = Field(1e-5, gt=0)
    """Highest learning rate: reached in 20 steps, then falling linearly to 0."""
    slip: float = Field(0.0, ge=0, lt=1)
    """Share of the demonstrator's steps replaced by a random admissible action that is not trained on."""
    demonstrator: dict[str, Any] = {}
    """Environment options that hold while it demonstrates, on top of ``env.options``: e.g. a less certain expert."""
    hesitation: float = Field(0.0, ge=0, lt=1)
    """Chance that a demonstrated reasoning is said once more, and again once more, before the action: what a policy
    needs to have learned for a recipe that cuts thinking short."""
    list_actions: bool = False
    """Whether prompts show the admissible actions; SPARK's cold start leaves them out."""
    seed: int = 0
