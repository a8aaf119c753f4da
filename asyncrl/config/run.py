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
from asyncrl.config.thinking import ThinkingConfig
from asyncrl.config.track import TrackConfig
from asyncrl.config.tree import TreeConfig


class RunConfig(Strict):
    env: EnvConfig
    model: ModelConfig = ModelConfig()
    prompt: PromptConfig = PromptConfig()
    tree: TreeConfig = TreeConfig()
    algo: AlgoConfig = AlgoConfig()
    sampling: SamplingConfig = SamplingConfig()
    thinking: ThinkingConfig | None = None
    """T2PO's control of thinking, inside the engine; None measures and cuts nothing."""
    engine: EngineConfig = EngineConfig()
    learner: LearnerConfig = LearnerConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    sft: SftConfig | None = None
    """The cold start that precedes training; None trains the model as it is."""
    eval: EvalConfig = EvalConfig()
    track: TrackConfig = Field(default_factory=TrackConfig)

    @model_validator(mode="after")
    def _parts_fit(self) -> "RunConfig":
        if self.tree.branches and self.algo.advantage == "grpo":
            raise ValueError(
                f"algo.advantage=grpo is for chains, but tree.criterion={self.tree.criterion} branches; "
                "set tree.criterion=none or algo.advantage=spark"
            )
        room = self.prompt.max_prompt_tokens + self.sampling.max_tokens
        if room > self.engine.max_model_len:
            raise ValueError(
                f"prompt.max_prompt_tokens + sampling.max_tokens = {room} exceeds "
                f"engine.max_model_len = {self.engine.max_model_len}"
            )
        if self.tree.criterion == "explore" and self.prompt.method != "spark":
            raise ValueError("tree.criterion=explore needs prompt.method=spark: other formats have no <explore>")
        if self.runtime.late == "correct" and self.algo.weights == "none":
            raise ValueError(
                "runtime.late=correct trains beyond max_lag: set algo.weights (with algo.proximal=recomputed)"
            )
        if self.thinking is not None:
            longest = self.sampling.max_tokens
            for name in ("min_tokens", "window", "cap"):
                if self.thinking.tti and getattr(self.thinking, name) >= longest:
                    raise ValueError(
                        f"thinking.{name}={getattr(self.thinking, name)} must be below "
                        f"sampling.max_tokens={longest}: no turn would be cut by it"
                    )
        gpus = self.engine.gpus, self.learner.gpus
        together = self.engine.generators * gpus[0] + self.learner.world_size * gpus[1]
        shared = all(0 < share < 1 for share in gpus) and together <= 1 + 1e-9 and self.learner.world_size == 1
        if gpus not in ((0, 0), (1, 1)) and not shared:
            raise ValueError(
                f"engine.gpus={gpus[0]:g} and learner.gpus={gpus[1]:g} (all actors together {together:g}): set both to "
                "0 (CPU), both to 1 (a GPU for each actor), or both below 1 and together at most 1 (one GPU, shared by "
                "generators and one learner rank)"
            )
        return self
