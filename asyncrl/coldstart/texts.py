"""What an environment says, for training a tokenizer on.

Invariants: the texts are the messages and responses that a policy will read and write in this environment (random
and expert episodes through the prompt builder and the annotator); they are a function of their arguments alone.
"""

import random
from collections.abc import Iterator
from contextlib import closing

from asyncrl.coldstart.annotate import DemoStep, annotate
from asyncrl.coldstart.rows import demonstrate
from asyncrl.config.prompt import PromptConfig
from asyncrl.env import Env, EnvSpec
from asyncrl.text.message import PromptBuilder
from asyncrl.types import Task

RANDOM_TURNS = 12


def environment_texts(spec: EnvSpec, split: str, prompt: PromptConfig, episodes: int) -> Iterator[str]:
    """Messages and responses of ``episodes`` tasks spread over ``split``, each played at random and by the expert."""
    with closing(spec.make()) as env:
        builder = PromptBuilder(prompt, env.role, moves=env.moves)
        rng = random.Random(0)
        ids = env.tasks(split)
        for task_id in ids[:: max(1, len(ids) // episodes)][:episodes]:
            task = Task(spec.name, task_id)
            for steps in (_random_episode(env, task, rng), demonstrate(env, task, 0.0, rng) or []):
                past = [(step.observation, step.action) for step in steps]
                yield from (builder.build(step.observation, past[:i]) for i, step in enumerate(steps))
                yield from annotate(steps, prompt.method, moves=env.moves)


def _random_episode(env: Env, task: Task, rng: random.Random) -> list[DemoStep]:
    """Up to ``RANDOM_TURNS`` random admissible actions; none where the environment cannot list them."""
    observation = env.reset(task)
    steps: list[DemoStep] = []
    for _ in range(RANDOM_TURNS):
        actions = observation.actions if observation.actions is not None else env.list_actions()
        if not actions:
            break
        steps.append(DemoStep(observation, rng.choice(actions)))
        step = env.step(steps[-1].action)
        if step.done:
            break
        observation = step.observation
    return steps
