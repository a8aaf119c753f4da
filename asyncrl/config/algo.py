"""Credit and loss."""

from typing import Literal

from pydantic import Field, model_validator

from asyncrl.config.base import Strict


class AlgoConfig(Strict):
    advantage: Literal["spark", "grpo", "gigpo"] = "spark"
    """``spark``: group statistics over the step rows of all leaves, shared turns once a leaf. ``grpo``: the same over
    chains. ``gigpo``: over either, and beside it among the turns taken in one state, as T2PO does."""
    turn_weight: float = Field(1.0, ge=0)
    """Of the turn's own advantage, in ``gigpo``."""
    discount: float = Field(0.95, gt=0, le=1)
    """Of the reward, for each turn between a turn and the last, in the turn's own advantage."""
    anchor_similarity: float = Field(1.0, gt=0, le=1)
    """From where on two observations are of one state, in ``gigpo``; below 1 by ``difflib``'s ratio (searches: 0.9)."""
    statistics: Literal["steps", "trajectories"] = "steps"
    """What group mean and std run over; the releases use step rows."""
    normalise: Literal["mean_std", "mean"] = "mean_std"
    prefix: Literal["duplicate", "mean"] = "duplicate"
    """Credit of a turn shared by several leaves: the sum over them (SPARK's release), or one copy with their mean."""
    success_reward: float = Field(10.0, gt=0)
    """Terminal reward of a successful leaf; a failed one gets 0."""
    invalid_penalty: float = Field(0.1, ge=0)
    """Subtracted from the score of a turn that is not in order."""
    penalty_on: Literal["valid", "format"] = "valid"
    """What is not in order: a broken format or, with ``valid``, also an action that is not in the observation's list,
    where it has one (T2PO's release in ALFWorld). ``format`` is the papers' reading, and the right one where patterns
    are listed, as WebShop's ``search[...]``."""
    length_reward: float = Field(0.0, ge=0)
    """Weight of a reward for being shorter than the group's other leaves (Kimi k1.5), one of T2PO's comparisons."""
    void_filter: bool = False
    """A turn without any action ends its episode, and the whole path is left out of the loss, though its return counts
    in the group's statistics (SimpleTIR), one of T2PO's comparisons."""
    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.2, gt=0)
    dual_clip: float = Field(3.0, gt=1)
    kl_coef: float = Field(0.01, ge=0)
    """Weight of the k3 divergence from the cold-start model; 0 loads no reference."""
    entropy_coef: float = Field(0.001, ge=0)
    proximal: Literal["behaviour", "recomputed"] = "behaviour"
    """What the loss's ratio is taken against: the policy that sampled, or the learner's own when the batch began
    (decoupled PPO)."""
    weights: Literal["none", "token", "sequence"] = "none"
    """Truncated importance weights min(proximal / behaviour, ``weight_cap``), per token or multiplied over a turn."""
    weight_cap: float = Field(2.0, ge=1)
    reject: Literal["none", "token", "sequence"] = "none"
    """Leave out tokens, or turns by the geometric mean of their tokens, whose ratio of the learner's to the behaviour
    policy lies outside ``reject_low`` to ``reject_high``."""
    reject_low: float = Field(0.5, ge=0, lt=1)
    reject_high: float = Field(2.0, gt=1)

    @model_validator(mode="after")
    def _weights_have_a_ratio(self) -> "AlgoConfig":
        if self.weights != "none" and self.proximal != "recomputed":
            raise ValueError(
                f"weights={self.weights} needs proximal=recomputed, got {self.proximal}: a ratio taken against the "
                "behaviour policy is the importance weight already; set algo.proximal=recomputed or algo.weights=none"
            )
        return self
