"""How a turn becomes a prompt and how the response is read."""

from typing import Literal

from pydantic import Field

from asyncrl.config.base import Strict

Method = Literal["spark", "react"]


class PromptConfig(Strict):
    method: Method = "spark"
    """Output format. ``spark``: one ``<explore>`` or ``<think>`` block, then ``<action>``; ``react``: ``<think>``, then
    ``<action>``."""
    style: Literal["full", "compact"] = "full"
    """``full`` explains the format in words, for pretrained models; ``compact`` leaves the words out, for tiny ones."""
    history: int = Field(5, ge=0)
    """Remembered turns (observation and action) shown in the prompt; SPARK: 5."""
    max_prompt_tokens: int = Field(2048, ge=16)
    """A longer prompt falls back to the variant without history; one that is still longer ends the trajectory."""
