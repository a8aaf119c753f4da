"""Demonstrations turned into supervised rows.

Invariants: a row's prompt is made by the encoder that makes the prompts of reinforcement learning, so the two are
identical token for token (but for the admissible actions, which the cold start may leave out); its response ends with
the end token; only successful trajectories are kept; a slip is in the history of later rows and is no row itself.
The rows are a function of the environment, the configuration and ``sft.seed``.
"""

import random
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from itertools import islice
from typing import Any

from asyncrl.coldstart.annotate import DemoStep, annotate
from asyncrl.config.coldstart import SftConfig
from asyncrl.config.prompt import PromptConfig
from asyncrl.env import Env, EnvSpec
from asyncrl.text.prompt import PromptEncoder
from asyncrl.types import Row, Task


def expert_rows(spec: EnvSpec, split: str, tokenizer: Any, prompt: PromptConfig, sft: SftConfig) -> list[Row]:
    """Rows of ``sft.trajectories`` successful expert trajectories, or of as many as the split's tasks give.

    Raises:
        ValueError: no task of the split has an expert; ``sft.slip`` with an expert that cannot answer from any state.
        PromptTooLong: a prompt exceeds ``prompt.max_prompt_tokens``.
    """
    with closing(EnvSpec(spec.name, spec.target, {**spec.options, **sft.demonstrator}).make()) as env:
        encoder = PromptEncoder(tokenizer, prompt, env.role, env.moves)
        rng = random.Random(sft.seed)
        ids = list(env.tasks(split))
        rng.shuffle(ids)
        tried = (demonstrate(env, Task(spec.name, task_id, sft.seed), sft.slip, rng) for task_id in ids)
        kept = islice(filter(None, tried), sft.trajectories)
        hesitation = random.Random(sft.seed)
        rows = [row for steps in kept for row in _rows(steps, encoder, prompt, sft, hesitation)]
    if not rows:
        raise ValueError(f"sft: environment {spec.name!r} has no successful expert trajectory in split {split!r}")
    return rows


def demonstrate(env: Env, task: Task, slip: float, rng: random.Random) -> list[DemoStep] | None:
    """One trajectory of the environment's expert, or None where it does not succeed.

    ``slip``: share of its steps replaced by a random admissible action.

    Raises ValueError: ``slip`` above 0 where the expert knows only whole episodes.
    """
    observation = env.reset(task)
    script: Iterator[str] | None = None
    if env.expert_action() is None:
        if slip:
            raise ValueError(
                f"sft.slip is {slip}, but the expert of {task.env!r} knows only whole episodes and cannot recover from "
                "a slip; set sft.slip to 0"
            )
        script = iter(env.expert(task) or ())
        observation = env.reset(task)
    steps: list[DemoStep] = []
    while True:
        action = env.expert_action() if script is None else next(script, None)
        if action is None:
            return None
        actions = observation.actions or ()
        slipped = bool(actions) and rng.random() < slip
        if slipped:
            action = rng.choice(actions)
        steps.append(DemoStep(observation, action, slipped))
        step = env.step(action)
        if step.done:
            return steps if step.info.get("success") else None
        observation = step.observation


def _rows(
    steps: list[DemoStep], encoder: PromptEncoder, prompt: PromptConfig, sft: SftConfig, rng: random.Random
) -> list[Row]:
    past = [(step.observation, step.action) for step in steps]
    responses = annotate(steps, prompt.method, lambda: rng.random() < sft.hesitation, encoder.moves)
    prompt_of = partial(encoder.encode, list_actions=sft.list_actions)
    return [
        Row(prompt_of(step.observation, past[:i]), encoder.encode_response(response))
        for i, (step, response) in enumerate(zip(steps, responses, strict=True))
        if not step.slip
    ]
