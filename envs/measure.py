"""What environments cost, and how often an expert and a random agent succeed: a table, a row an environment.

python -m envs.measure pantry sokoban,mode=image scienceworld [--json FILE] [--seconds S] [--tasks N]

Invariants: each environment is measured in processes of its own, one after the other; an environment that cannot be
measured keeps its row, which says what to do. Tasks and random moves are a function of the seed; times are wall clock.
"""

import argparse
import json
import os
import pickle
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.env import Env, EnvSpec, Trace, replay
from asyncrl.types import Observation, Task
from envs.names import read_name

DEPTHS = (10, 30)
"""Turns after which a branch is timed."""
BRANCHES = 10
"""Branches timed at each depth; the median counts."""
TRIES = 60
"""Random walks among which those are looked for that are not over before the depth."""
MEMORY_GIB = 24
SPLITS = {"searchqa": "small_test"}
"""Where the training questions are large files that seldom lie on a small machine."""
EXPERT_OPTIONS: dict[str, dict[str, Any]] = {"scienceworld": {"max_turns": 100}}
"""ScienceWorld's gold paths are longer than an agent's 30 turns; its simulator stops at 100 moves."""
QUERY = "<your query>"
"""What stands for words of one's own in a listed action."""
START = "import time; t = time.perf_counter(); import pickle, sys; pickle.load(sys.stdin.buffer).make().close(); "
START += "sys.stdout.write(str(time.perf_counter() - t))"


@dataclass(slots=True)
class Figures:
    """Of one environment; None where it was not measured or does not apply."""

    name: str
    problem: str = ""
    """Why there are no figures, and the remedy."""
    start_s: float | None = None
    """Import and construction in a fresh interpreter; the median of three."""
    first_turn_s: float | None = None
    """The first reset and step of a process, which may read data, make an index or start a process."""
    reset_ms: float | None = None
    """Median."""
    reset_p95_ms: float | None = None
    steps_per_s: float | None = None
    """Of one environment; neither resets nor the listing of actions counted."""
    steps_per_s_with_resets: float | None = None
    memory_mb: float | None = None
    """Resident, of the process and its children, after the random episodes."""
    fits: int | None = None
    """Processes of that size in :data:`MEMORY_GIB`."""
    branch_ms: dict[str, float | None] = field(default_factory=dict)
    """Depth -> median: a copy into another instance, or verified replay; None where no episode is that long."""
    expert: float | None = None
    """Share of the tasks tried that it solves."""
    expert_tasks: int = 0
    random: float | None = None
    random_tasks: int = 0
    """Fewer than asked for where the time was up."""
    steps: int = 0


def measure(spec: EnvSpec, split: str, tasks: int, seconds: float, seed: int) -> Figures:
    """All figures of one environment, in this process.

    Args:
        tasks: for the shares of success, drawn from the split by ``seed``.
        seconds: after which the random agent and, apart, the expert begin no further task.

    Raises ValueError: the environment or its data is not here.
    """
    spec.env_class().preflight()
    figures = Figures(_title(spec))
    with closing(spec.make()) as env:
        env.check_splits(split)
        ids = env.tasks(split)
        drawn = random.Random(seed).sample(ids, min(tasks, len(ids)))
        chosen = [Task(spec.name, one, seed) for one in drawn]
        _say(f"{figures.name}: starting")
        figures.start_s = statistics.median(_start_s(spec) for _ in range(3))
        begun = time.perf_counter()
        env.step(random_move(env, env.reset(chosen[0]), random.Random(seed), answers=0))
        figures.first_turn_s = time.perf_counter() - begun
        _say(f"{figures.name}: random agent, up to {len(chosen)} tasks or {seconds:.0f} s")
        _random_agent(env, chosen, seconds, random.Random(seed), figures)
        figures.memory_mb = resident_mb(os.getpid())
        figures.fits = int(MEMORY_GIB * 1024 / figures.memory_mb)
        _say(f"{figures.name}: branches")
        with closing(spec.make()) as other:
            other.reset(chosen[0])
            figures.branch_ms = {str(d): _branch_ms(env, other, chosen, d, random.Random(seed)) for d in DEPTHS}
    _say(f"{figures.name}: expert")
    options = {**spec.options, **EXPERT_OPTIONS.get(spec.name, {})}
    with closing(replace(spec, options=options).make()) as env:
        _expert(env, chosen, seconds, figures)
    return figures


def random_move(env: Env, seen: Observation, rng: random.Random, answers: float = 0.4) -> str:
    """A listed action; words of the goal where it asks for a query; on Search QA a random search or answer.

    ``answers``: chance of an answer, which ends the episode.
    """
    if env.moves == "search":
        from envs.searchqa.measure import random_move as search_or_answer

        return search_or_answer(rng, seen.goal, seen.text, last=rng.random() < answers)
    listed = seen.actions if seen.actions is not None else env.list_actions()
    move = rng.choice(listed or ("",))
    if QUERY in move:
        words = seen.goal.split()
        move = move.replace(QUERY, " ".join(rng.sample(words, min(3, len(words)))))
    return move


def resident_mb(pid: int) -> float:
    """Resident memory of a process and all its descendants, from /proc."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20 + sum(map(resident_mb, _children(pid)))


def _children(pid: int) -> Iterator[int]:
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        yield from map(int, listing.read_text().split())


def _start_s(spec: EnvSpec) -> float:
    command, given = [sys.executable, "-c", START], pickle.dumps(spec)
    return float(subprocess.run(command, input=given, stdout=subprocess.PIPE, check=True, timeout=300).stdout)


def _random_agent(env: Env, tasks: Sequence[Task], seconds: float, rng: random.Random, figures: Figures) -> None:
    end = time.monotonic() + seconds
    resets: list[float] = []
    spent, won = 0.0, 0
    for task in tasks:
        begun = time.perf_counter()
        seen = env.reset(task)
        resets.append(time.perf_counter() - begun)
        done = False
        while not done:
            move = random_move(env, seen, rng)
            begun = time.perf_counter()
            step = env.step(move)
            spent, figures.steps = spent + time.perf_counter() - begun, figures.steps + 1
            seen, done = step.observation, step.done
        won += bool(step.info["success"])
        if time.monotonic() > end:
            break
    figures.random, figures.random_tasks = won / len(resets), len(resets)
    figures.reset_ms, figures.reset_p95_ms = 1e3 * statistics.median(resets), 1e3 * float(np.quantile(resets, 0.95))
    figures.steps_per_s = figures.steps / spent
    figures.steps_per_s_with_resets = figures.steps / (spent + sum(resets))


def _branch_ms(env: Env, other: Env, tasks: Sequence[Task], depth: int, rng: random.Random) -> float | None:
    """Median time to give ``other`` the state of ``env`` after ``depth`` random moves; the turn limit is raised."""
    env.max_turns = other.max_turns = max(env.max_turns, depth + 1)  # type: ignore[misc]  # of these two alone
    spent: list[float] = []
    for walk in range(TRIES):
        trace = _walk(env, tasks[walk % len(tasks)], depth, rng)
        if trace is None:
            continue
        begun = time.perf_counter()
        if env.can_snapshot:
            other.restore(env.snapshot())
        else:
            replay(other, trace, env.list_actions())
        spent.append(time.perf_counter() - begun)
        if len(spent) == BRANCHES:
            break
    return 1e3 * statistics.median(spent) if spent else None


def _walk(env: Env, task: Task, depth: int, rng: random.Random) -> Trace | None:
    """``depth`` random moves, or None where the episode ends before."""
    trace = Trace(task, env.reset(task))
    while len(trace.steps) < depth:
        move = random_move(env, trace.last, rng, answers=0)
        trace.add(move, env.step(move))
        if trace.steps[-1].done:
            return None
    return trace


def _expert(env: Env, tasks: Sequence[Task], seconds: float, figures: Figures) -> None:
    end = time.monotonic() + seconds
    won = tried = known = 0
    for task in tasks:
        actions = env.expert(task)
        known += actions is not None
        won, tried = won + _succeeds(env, task, actions or ()), tried + 1
        if time.monotonic() > end:
            break
    if known:
        figures.expert, figures.expert_tasks = won / tried, tried


def _succeeds(env: Env, task: Task, actions: Sequence[str]) -> bool:
    env.reset(task)
    for action in actions:
        step = env.step(action)
        if step.done:
            return bool(step.info["success"])
    return False


def _title(spec: EnvSpec) -> str:
    return " ".join([spec.name, *(f"{key}={value}" for key, value in spec.options.items())])


def measure_apart(spec: EnvSpec, split: str, tasks: int, seconds: float, seed: int) -> Figures:
    """:func:`measure` in a process of its own; what is missing here becomes the row's ``problem``."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            return pool.submit(measure, spec, split, tasks, seconds, seed).result()
        except (ValueError, ImportError) as error:
            return Figures(_title(spec), problem=str(error))


COLUMNS = (
    "environment", "start s", "first turn s", "reset ms", "p95", "steps/s", "with resets", "memory MB",
    f"in {MEMORY_GIB} GiB", *(f"branch at {depth}, ms" for depth in DEPTHS), "expert", "random",
)  # fmt: skip


def table(rows: Sequence[Figures]) -> str:
    """A Markdown table; what could not be measured stands below it."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *(_cells(row) for row in rows)]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([text, *(f"\n{row.name}: not measured: {row.problem}" for row in rows if row.problem)])


def _cells(row: Figures) -> tuple[str, ...]:
    times = row.start_s, row.first_turn_s, row.reset_ms, row.reset_p95_ms
    work = row.steps_per_s, row.steps_per_s_with_resets, row.memory_mb, row.fits
    branches = (row.branch_ms.get(str(depth)) for depth in DEPTHS)
    shares = _share(row.expert, row.expert_tasks), _share(row.random, row.random_tasks)
    return row.name, *map(_number, (*times, *work, *branches)), *shares


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 100 else f"{value:.2g}"


def _share(value: float | None, of: int) -> str:
    return "–" if value is None else f"{100 * value:.1f} % of {of}"


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m envs.measure")
    parser.add_argument("names", nargs="+", metavar="NAME", help="NAME[,KEY=VALUE]..., e.g. sokoban,mode=image")
    parser.add_argument("--json", type=Path, help="file for the figures in full")
    parser.add_argument("--seconds", type=float, default=60, help="for the random agent, and again for the expert")
    parser.add_argument("--tasks", type=int, default=200, help="for the shares of success")
    parser.add_argument("--split", help="default: train; small_test for searchqa")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    try:
        specs = [read_name(name) for name in given.names]
    except ValueError as error:
        parser.error(str(error))
    rows = []
    for spec in specs:
        split = given.split or SPLITS.get(spec.name, "train")
        rows.append(measure_apart(spec, split, given.tasks, given.seconds, given.seed))
        if given.json:
            given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    sys.stdout.write(table(rows) + "\n")


if __name__ == "__main__":
    main()
