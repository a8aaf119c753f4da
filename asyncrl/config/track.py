"""Where measurements go. JSON lines and TensorBoard are always written."""

from typing import Literal

from pydantic import Field

from asyncrl.config.base import Strict


class TrackConfig(Strict):
    dir: str = "runs"
    """Parent of the run folders."""
    name: str = Field("run", min_length=1, pattern=r"^[\w.-]+$")
    """The run's folder and its name in W&B."""
    wandb: Literal["auto", "online", "offline", "disabled"] = "auto"
    """``auto`` is online when the user is logged in to W&B, else offline."""
    wandb_project: str = "asyncrl"
