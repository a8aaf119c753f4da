"""The asynchronous loop."""

from typing import Literal

from pydantic import Field

from asyncrl.config.base import Strict

Late = Literal["wait", "correct", "drop"]


class RuntimeConfig(Strict):
    versions: int = Field(120, ge=0)
    """Versions published in a run, one a training batch; each batch makes ``learner.updates_per_batch`` updates."""
    groups_per_batch: int = Field(16, ge=1)
    """Task groups in a training batch, however many turn samples they come to. With fewer, publishes come more often:
    no batch waits for another's groups."""
    mode: Literal["sync", "one_step", "async"] = "async"
    """``sync`` generates every batch with the newest weights (``max_lag`` 0), ``one_step`` while the batch before is
    trained (1), ``async`` up to ``max_lag``. One code path: only the bound differs."""
    max_lag: int = Field(2, ge=0)
    """Most versions a group may be behind when it is trained, in mode ``async``."""
    late: Late = "wait"
    """What becomes of a group that still runs when the next batch would push it past ``max_lag``: the batch waits, the
    group is trained late (with importance weights), or it is given up and counted."""
    coordinators: int = Field(2, ge=1)
    """Actors that expand forests."""
    seed: int = 0
    eval_every: int = Field(0, ge=0)
    """Versions between evaluations during training; 0 evaluates only at start and end."""
    checkpoint_every: int = Field(10, ge=1)
    """Versions between checkpoints; the last version always makes one."""
    keep_checkpoints: int = Field(2, ge=1)
    check_publish: bool = True
    """After each publish compare the engine's log-probs of a few sampled tokens with the learner's."""
    group_timeout_s: float = Field(3600, gt=0)
    """Longest one task's forest may take before it is reported lost and its task admitted again."""

    @property
    def lag_bound(self) -> int:
        """Most versions of lag in this mode."""
        return {"sync": 0, "one_step": 1}.get(self.mode, self.max_lag)
