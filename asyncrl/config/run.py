"""One run, whole: the sections and the rules that tie them together."""

from pydantic import Field, model_validator

from asyncrl.config.algo import AlgoConfig
from asyncrl.config.base import Strict
from asyncrl.config.coldstart import SftConfig
from asyncrl.config.engine import EngineConfig
from asyncrl.config.env import EnvConfig
from asyncrl.config.evaluate import EvalConfig
from asyncrl.config.learner import LearnerConfig
from asyncrl.config.model import ModelConfig
from asyncrl.config.prompt import PromptConfig
from asyncrl.config.runtime import RuntimeConfig
from asyncrl.config.sampling import SamplingConfig
from asyncrl.config.track import TrackConfig
from asyncrl.config.tree import TreeConfig


class RunConfig(Strict):
    env: EnvConfig
    model: ModelConfig = ModelConfig()
    prompt: PromptConfig = PromptConfig()
    tree: TreeConfig = TreeConfig()
    algo: AlgoConfig = AlgoConfig()
    sampling: SamplingConfig = SamplingConfig()
    engine: EngineConfig = EngineConfig()
    learner: LearnerConfig = LearnerConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    sft: SftConfig | None = None
    """The cold start that precedes training; None trains the model as it is."""
    eval: EvalConfig = EvalConfig()
    track: TrackConfig = Field(default_factory=TrackConfig)

    @model_validator(mode="after")
    def _parts_fit(self) -> "RunConfig":
        if self.tree.branches and self.sampling.temperature == 0:
            raise ValueError(
                "sampling.temperature is 0 but tree.criterion branches: siblings would be identical; "
                "set a temperature above 0 or tree.criterion=none"
            )
        room = self.prompt.max_prompt_tokens + self.sampling.max_tokens
        if room > self.engine.max_model_len:
            raise ValueError(
                f"prompt.max_prompt_tokens + sampling.max_tokens = {room} exceeds "
                f"engine.max_model_len = {self.engine.max_model_len}"
            )
        if self.tree.criterion == "explore" and self.prompt.method != "spark":
            raise ValueError("tree.criterion=explore needs prompt.method=spark: other formats have no <explore>")
        return self
