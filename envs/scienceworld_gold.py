"""Do the simulator's own solutions work? python -m envs.scienceworld_gold [--tasks 200] [--split S] [--seed N]

Invariants: tasks go round the types evenly, within a type as the seed draws them. A path fits if the simulator's limit
of moves does not cut it short; turns are no limit here. Whether a path reaches 100 is what playing it gave.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from random import Random
from typing import NamedTuple

from asyncrl.types import Task
from envs.scienceworld import MOVE_LIMIT, ScienceWorld
from envs.scienceworld_splits import go_round, parse_id, task_ids


class Played(NamedTuple):
    """A gold path's end."""

    id: str
    actions: int
    """Of the whole path."""
    score: int
    """The best on the way, -100 to 100."""
    moves: int
    """That the simulator had counted when the path, or the episode, ended."""

    @property
    def fits(self) -> bool:
        return self.score == 100 or self.moves <= MOVE_LIMIT


def play(ids: Sequence[str]) -> Iterator[Played]:
    """The gold path of each task, executed until the episode ends."""
    with closing(ScienceWorld(max_turns=10_000)) as env:
        for one in ids:
            task = Task("scienceworld", one)
            path = env.gold_path(task)
            env.reset(task)
            best = moves = 0
            for action in path:
                step = env.step(action)
                best, moves = max(best, step.info["score"]), step.info["moves"]
                if step.done:
                    break
            yield Played(one, len(path), best, moves)


def draw(split: str, count: int, seed: int) -> list[str]:
    """``count`` task ids of a split, in equal shares of its types as far as those have enough."""
    types: dict[str, list[int]] = defaultdict(list)
    for name, variation in map(parse_id, task_ids(split)):
        types[name].append(variation)
    rng = Random(seed)
    return go_round((name, rng.sample(those, len(those))) for name, those in types.items())[:count]


def table(played: Sequence[Played]) -> str:
    """A Markdown table, a row a type, and the sums."""
    types: dict[str, list[Played]] = defaultdict(list)
    for one in played:
        types[parse_id(one.id)[0]].append(one)
    lines = ["| type | paths | of these fit | of these reach 100 | longest |", "|---|---|---|---|---|"]
    for name, rows in [*sorted(types.items()), ("all", list(played))]:
        fit = [one for one in rows if one.fits]
        reached = sum(one.score == 100 for one in fit)
        longest = max((one.actions for one in rows), default=0)
        lines.append(f"| {name} | {len(rows)} | {len(fit)} | {reached} | {longest} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m envs.scienceworld_gold")
    parser.add_argument("--tasks", type=int, default=200)
    parser.add_argument("--split", default="train")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jvms", type=int, default=2, help="that play at once")
    given = parser.parse_args()
    try:
        ScienceWorld.preflight()
        ids = draw(given.split, given.tasks, given.seed)
    except ValueError as error:
        parser.error(str(error))
    played: list[Played] = []

    def play_all(ids_of_one: Sequence[str]) -> None:
        for one in play(ids_of_one):
            played.append(one)
            sys.stderr.write(f"\r{len(played)} of {len(ids)} {one.id:60}")
            sys.stderr.flush()

    with ThreadPoolExecutor(given.jvms) as pool:  # the work is the JVMs'
        for done in [pool.submit(play_all, ids[first :: given.jvms]) for first in range(given.jvms)]:
            done.result()
    sys.stderr.write("\n")
    sys.stdout.write(f"{table(played)}\n")
    for one in played:
        if one.fits and one.score < 100:
            sys.stdout.write(f"{one.id}: {one.actions} actions, {one.moves} moves, best score {one.score}\n")


if __name__ == "__main__":
    main()
