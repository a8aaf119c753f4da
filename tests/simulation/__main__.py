"""Run schedules: ``python -m tests.simulation --schedules 5000`` or, to replay one, ``--seed 1234 --trace``.

Exits with 1 when a schedule broke a promise; each that did is printed with its seed.
"""

import argparse
import gc
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator

import scipy.stats  # noqa: F401  # evaluation imports it late, which every process would do anew

from tests.simulation.world import Outcome, simulate

CHUNK = 10
"""Schedules that a process is given at a time."""
CHUNKS = 10
"""Chunks after which a process is replaced: it never takes its garbage out."""
WORST = 10
"""Failing schedules after which the rest is not run."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--schedules", type=int, default=5000, help="how many (default: 5000)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first (default: 0)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="default: one a CPU")
    parser.add_argument("--seed", type=int, help="run only the schedule of this seed")
    parser.add_argument("--trace", action="store_true", help="with --seed: print every event and every log line")
    given = parser.parse_args()
    if given.seed is not None:
        outcome = simulate(given.seed, _say if given.trace else None)
        _say(_sentence(outcome))
        return int(bool(outcome.violations))
    return _many(given.first, given.schedules, given.processes)


def _many(first: int, schedules: int, processes: int) -> int:
    began, done, failed = time.monotonic(), 0, 0
    deaths: Counter[str] = Counter()
    lives = tasks = 0
    cpu_s = 0.0
    for outcome in run(first, schedules, processes):
        done += 1
        deaths.update(outcome.deaths)
        lives, tasks, cpu_s = lives + outcome.lives, tasks + outcome.tasks, cpu_s + outcome.cpu_s
        if outcome.violations:
            failed += 1
            _say(_sentence(outcome))
            if failed == WORST:
                break
        if done % max(1, schedules // 20) == 0:
            _say(f"{done} of {schedules} schedules, {failed} failed, {time.monotonic() - began:.0f} s")
    died = ", ".join(f"{count} {kind}" for kind, count in deaths.most_common())
    _say(
        f"{done} schedules in {time.monotonic() - began:.0f} s on {processes} processes: {failed} failed, "
        f"{1e3 * cpu_s / done:.0f} ms of CPU each; {tasks} tasks trained, {lives} starts, deaths: {died}"
    )
    return int(failed > 0)


def run(first: int, schedules: int, processes: int) -> Iterator[Outcome]:
    """Outcomes of the seeds from ``first`` on, as they come."""
    chunks = [range(at, min(at + CHUNK, first + schedules)) for at in range(first, first + schedules, CHUNK)]
    with multiprocessing.get_context("fork").Pool(processes, _begin, maxtasksperchild=CHUNKS) as pool:
        for outcomes in pool.imap_unordered(_chunk, chunks):
            yield from outcomes


def _begin() -> None:
    gc.freeze()
    gc.disable()


def _chunk(seeds: range) -> list[Outcome]:
    return [simulate(seed) for seed in seeds]


def _sentence(outcome: Outcome) -> str:
    if not outcome.violations:
        return (
            f"seed {outcome.seed}: well, after {outcome.virtual_s:.0f} virtual seconds, {outcome.lives} starts and the "
            f"deaths of {', '.join(outcome.deaths)}"
        )
    told = "\n  ".join(dict.fromkeys(outcome.violations))
    return (
        f"seed {outcome.seed} FAILED:\n  {told}\n  deaths: {', '.join(outcome.deaths)}\n"
        f"  replay: python -m tests.simulation --seed {outcome.seed} --trace"
    )


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
