"""A Ray actor that expands forests and turns them into training rows.

Invariants: a forest lives in one coordinator; what the driver gets back is numbers (a :class:`GroupSummary`), while
the turn samples and the tree's record stay in the object store until the learner and the recorder fetch them.
"""

import random
import sys
from functools import partial
from typing import Any

from asyncrl.algo.samples import turn_samples
from asyncrl.config.run import RunConfig
from asyncrl.config.tree import TreeConfig
from asyncrl.engine.fleet import Fleet
from asyncrl.engine.waits import bounded
from asyncrl.model.load import load_tokenizer
from asyncrl.rollout.expansion import Expansion, Site
from asyncrl.rollout.slot import Slot
from asyncrl.rollout.summary import GroupSummary, summarise
from asyncrl.text.prompt import PromptEncoder
from asyncrl.tree.criteria import make_criterion
from asyncrl.tree.forest import Forest
from asyncrl.tree.records import GroupRecord, record_of
from asyncrl.types import Group, Sampling, Task, TurnSample

CHAIN = TreeConfig(roots=1, branch=1, leaves=1, criterion="none")
"""The forest of an evaluation episode."""


class EpisodeLost(Exception):
    """An evaluation episode has no score; its arguments are the cause's name
    (:data:`asyncrl.rollout.expansion.CAUSES`) and a sentence."""


class Coordinator:
    def __init__(self, name: str, config: RunConfig, model_path: str, generators: list[Any], pool: Any) -> None:
        """``name`` is under which the pool leases slots to this coordinator."""
        env_class = config.env.spec.env_class()
        self._config = config
        self._probe_tokens = config.engine.max_model_len - 1
        self._site = Site(
            config=config,
            fleet=Fleet(generators, config.engine),
            acquire=partial(Slot.acquire, pool, config.env.step_timeout_s, config.runtime.group_timeout_s, name),
            prompts=PromptEncoder(load_tokenizer(model_path), config.prompt, env_class.role, env_class.moves),
            copies_itself=env_class.can_snapshot,
            moves=env_class.moves,
            max_turns=config.env.max_turns or sys.maxsize,  # without a limit of ours the environment ends its episodes
        )

    async def ready(self) -> bool:
        return True

    async def expand(self, task: Task, key: int) -> tuple[GroupSummary, list[TurnSample], GroupRecord]:
        """Grow the training forest of one task.

        Raises TimeoutError: the forest took longer than ``runtime.group_timeout_s``.
        """
        config = self._config
        group = await self._grow(self._expansion(task, key, config.tree, config.sampling.temperature, training=True))
        samples = turn_samples(group, config.algo)
        return summarise(group, self._probe_tokens, samples), samples, record_of(group, config.tree, samples)

    async def evaluate(self, task: Task, key: int) -> GroupSummary:
        """One episode of one task, as a chain, at the evaluation temperature.

        Raises:
            EpisodeLost: it came to no end of its own.
            TimeoutError: as ``expand``.
        """
        expansion = self._expansion(task, key, CHAIN, self._config.sampling.eval_temperature)
        group = await self._grow(expansion)
        if not group.leaves:
            raise EpisodeLost(*expansion.last_loss)
        return summarise(group, self._probe_tokens)

    def _expansion(
        self, task: Task, key: int, tree: TreeConfig, temperature: float, training: bool = False
    ) -> Expansion:
        # The seed depends on the task attempt alone, so that any coordinator makes the same choices.
        rng = random.Random(f"{self._config.runtime.seed}/{key}/{task.env}/{task.id}")
        forest = Forest(task, key, tree, rng)
        sampling = Sampling(temperature=temperature, max_tokens=self._config.sampling.max_tokens)
        thinking, void_ends = self._config.thinking, training and self._config.algo.void_filter
        tds = thinking if training and thinking and thinking.tds else None
        return Expansion(self._site, forest, make_criterion(tree, rng), sampling, tds, void_ends)

    async def _grow(self, expansion: Expansion) -> Group:
        async with bounded(self._config.runtime.group_timeout_s, "the group", "runtime.group_timeout_s"):
            return await expansion.grow()
