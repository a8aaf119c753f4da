"""The shape of exploration: M roots, branching factor B, leaf budget N (SPARK, section 4; Eq. 6 and 7)."""

from typing import Literal

from pydantic import Field, model_validator

from asyncrl.config.base import Strict


class TreeConfig(Strict):
    roots: int = Field(4, ge=1)
    """M: independent trajectories a task starts with."""
    branch: int = Field(2, ge=1)
    """B: leaves a branching node has, its own continuation included; 1 never branches."""
    leaves: int = Field(8, ge=1)
    """N: most leaves a task's forest may ever hold, finished ones included."""
    criterion: Literal["explore", "bernoulli", "none"] = "explore"
    """Where to branch: at the policy's own ``<explore>``, at random with probability ``p``, or nowhere (chains)."""
    p: float = Field(0.1, ge=0, le=1)
    """Probability of ``bernoulli``, per turn."""

    @model_validator(mode="after")
    def _budget_holds_the_roots(self) -> "TreeConfig":
        if self.leaves < self.roots:
            raise ValueError(f"leaves (N = {self.leaves}) must be at least roots (M = {self.roots})")
        return self

    @property
    def branches(self) -> bool:
        return self.criterion != "none" and self.branch > 1 and self.leaves > self.roots
