"""Random prefixes replayed and verified: python -m envs.prefixes scienceworld [--count 200] [--split S] [--seed N]

Invariants: each prefix is of another task and is executed in one instance and replayed in another by
``asyncrl.env.replay``, which compares every step and what is admissible at the end; tasks, depths and moves are a
function of the seed. Where listing actions is dear they are listed every tenth turn: between, some are not admissible.
"""

import argparse
import random
import sys
from collections.abc import Iterator
from contextlib import closing

from asyncrl.env import Env, EnvSpec, ReplayMismatch, Trace, replay
from asyncrl.types import Task
from envs.names import read_name

LISTED_EVERY = 10


def verify(spec: EnvSpec, split: str, count: int, seed: int) -> Iterator[tuple[Trace, str]]:
    """Each prefix with what differed when it was replayed, or ``""``.

    Raises ValueError: the environment or its data is not here, or the split has fewer tasks than ``count``.
    """
    rng = random.Random(seed)
    with closing(spec.make()) as env, closing(spec.make()) as other:
        for one in rng.sample(env.tasks(split), count):
            trace = _prefix(env, Task(spec.name, one), rng.randint(1, max(1, env.max_turns - 1)), rng)
            try:
                replay(other, trace, None if trace.steps[-1].done else env.list_actions())
            except ReplayMismatch as mismatch:
                yield trace, str(mismatch)
            else:
                yield trace, ""


def _prefix(env: Env, task: Task, depth: int, rng: random.Random) -> Trace:
    trace = Trace(task, env.reset(task))
    listed: tuple[str, ...] = ("",)
    while len(trace.steps) < depth:
        if trace.last.actions is not None:
            listed = trace.last.actions
        elif len(trace.steps) % LISTED_EVERY == 0:
            listed = env.list_actions() or listed
        action = rng.choice(listed)
        trace.add(action, env.step(action))
        if trace.steps[-1].done:
            break
    return trace


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m envs.prefixes")
    parser.add_argument("name", help="NAME[,KEY=VALUE]...")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--split", default="train")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    steps, problems = 0, 0
    try:
        for i, (trace, problem) in enumerate(verify(read_name(given.name), given.split, given.count, given.seed), 1):
            steps, problems = steps + len(trace.steps), problems + bool(problem)
            if problem or i % 10 == 0:
                sys.stderr.write(f"{problem or f'{i} prefixes, {steps} steps'}\n")
    except ValueError as error:
        parser.error(str(error))
    sys.stdout.write(f"{given.count} prefixes, {steps} replayed steps, {problems} mismatches\n")
    raise SystemExit(bool(problems))


if __name__ == "__main__":
    main()
