"""The conformance checker behind ``asyncrl env check``: does an environment keep the protocol of ``asyncrl.env``?

Invariants: every check ends within a bounded number of steps and turns whatever the environment raises into a failed
check; the episodes played are a function of the seed. An environment is seen only through the protocol, so the checker
knows nothing of any particular one.
"""

import os
import pickle
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from asyncrl.env import Env, EnvSpec, ReplayMismatch, Trace, replay
from asyncrl.types import Observation, Step, Task

MALFORMED: tuple[str, ...] = (
    "",
    "   ",
    "\x00\x07\x1b[31m\r\n",
    "ünïcode 火 🎈 \u202e",
    "\ud800",
    "word " * 4000,
    "x" * 100_000,
    "</action><action>look",
    "'; DROP TABLE tasks; --",
    "{0.__class__} %s %n ${jndi:x}",
    "__import__('os').system('false')",
)
"""Actions no environment expects; each must be answered in the observation."""
INADMISSIBLE = "juggle the moon"


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. ``passed`` is None where the check does not apply."""

    name: str
    passed: bool | None
    detail: str


@dataclass(slots=True)
class Report:
    """Everything found, in the order it was checked."""

    checks: list[Check] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    """``reset_ms``, ``steps_per_s``, ``branch_ms``, ``expert_success`` (share of the tasks tried), where measured."""

    @property
    def passed(self) -> bool:
        return all(check.passed is not False for check in self.checks)

    def lines(self) -> Iterator[str]:
        """The report for a person, one line a finding."""
        for check in self.checks:
            mark = {True: "ok  ", False: "FAIL", None: "--  "}[check.passed]
            yield f"{mark} {check.name}: {check.detail}"
        for name, value in self.figures.items():
            yield f"     {name} = {value:.3g}"


def check(spec: EnvSpec, split: str = "train", tasks: int = 3, seed: int = 0) -> Report:
    """Verify an environment on ``tasks`` tasks of a split, drawn by ``seed``.

    Raises ValueError: the spec cannot be loaded, or refuses its options; everything else is a failed check.
    """
    spec.make().close()
    run = _Run(spec, split, tasks, seed)
    report = Report(figures=run.figures)
    for part, needed in (
        (run.splits, None),
        (run.types, run.tasks),
        (run.limits, run.traces),
        (run.determinism, run.traces),
        (run.fresh_process, run.tasks),
        (run.malformed, run.tasks),
        (run.pickling, run.traces),
        (run.snapshot, run.traces),
        (run.replay, run.traces),
        (run.expert, run.tasks),
    ):
        passed: bool | None = False
        try:
            if needed == []:
                raise _Skip("an earlier failure leaves nothing to try")
            passed, detail = True, part()
        except _Skip as reason:
            passed, detail = None, str(reason)
        except _Broken as problem:
            detail = str(problem)
        except Exception as error:  # whatever an author's code raises is a finding about it
            detail = f"raised {error!r:.300}"
        report.checks.append(Check(part.__name__.replace("_", " "), passed, detail))
    return report


class _Broken(AssertionError):
    """The environment breaks a rule; the message says which and where."""


class _Skip(Exception):
    """The check does not apply."""


class _Run:
    """The checks, in order; ``splits`` draws the tasks and ``types`` records the episodes that later ones repeat."""

    def __init__(self, spec: EnvSpec, split: str, count: int, seed: int) -> None:
        self.spec, self.split, self.count, self.seed = spec, split, count, seed
        self.figures: dict[str, float] = {}
        self.tasks: list[Task] = []
        self.traces: list[Trace] = []

    def splits(self) -> str:
        env_class = self.spec.env_class()
        ids = {name: list(env_class.tasks(name)) for name in dict.fromkeys((self.split, "train", "test"))}
        for name, listed in ids.items():
            _require(bool(listed), f"split {name!r} holds no task")
            _require(all(isinstance(one, str) for one in listed), f"split {name!r} holds ids that are not strings")
            _require(len(set(listed)) == len(listed), f"split {name!r} holds an id twice")
            _require(listed == list(env_class.tasks(name)), f"split {name!r} changes from call to call")
        chosen = random.Random(self.seed).sample(ids[self.split], min(self.count, len(ids[self.split])))
        self.tasks += [Task(self.spec.name, one, self.seed) for one in chosen]
        shared = set(ids["train"]) & set(ids["test"])
        _require(not shared, f"train and test share {len(shared)} ids, e.g. {sorted(shared)[:3]}")
        try:
            env_class.tasks("no such split")
        except ValueError:
            return ", ".join(f"{name} {len(listed)}" for name, listed in ids.items())
        raise _Broken("an unknown split is not refused with ValueError")

    def types(self) -> str:
        role = self.spec.env_class().role
        _require(isinstance(role, str) and bool(role.strip()), "role must be a sentence")
        with closing(self.spec.make()) as env:
            limit = env.max_turns
            _require(type(limit) is int and limit >= 1, f"max_turns must be a positive int, it is {limit!r}")
            traces = [_random_episode(env, task) for task in self.tasks]
        self.traces += traces
        return f"{sum(len(trace.steps) for trace in traces)} steps of {len(traces)} random episodes"

    def limits(self) -> str:
        for trace in self.traces:
            last = trace.steps[-1]
            _require(last.done, f"task {trace.task.id}: not over after max_turns = {len(trace.steps)} steps")
            _require(
                isinstance(last.info.get("success"), bool),
                f"task {trace.task.id}: the last step's info must hold 'success' (bool), is {dict(last.info)!r:.200}",
            )
        lengths = [len(trace.steps) for trace in self.traces]
        return f"random episodes end after {min(lengths)} to {max(lengths)} steps and say whether they succeeded"

    def determinism(self) -> str:
        resets = steps = 0.0
        with closing(self.spec.make()) as env:
            # Another instance, in another order, then the same one again: state that leaks between episodes shows.
            for trace in reversed(self.traces):
                _repeat(env, trace, "in a second instance")
            for trace in self.traces:
                start = time.perf_counter()
                env.reset(trace.task)
                begun = time.perf_counter()
                for action in trace.actions:
                    env.step(action)
                resets, steps = resets + begun - start, steps + time.perf_counter() - begun
            for trace in self.traces:
                _repeat(env, trace, "again in the same instance")
        count = sum(len(trace.steps) for trace in self.traces)
        self.figures |= {"reset_ms": 1000 * resets / len(self.traces), "steps_per_s": count / max(steps, 1e-9)}
        return f"{count} steps repeated in a second instance, twice"

    def fresh_process(self) -> str:
        here = first_observations(self.spec, self.tasks)
        for salt in ("1", "2"):
            for task, one, other in zip(self.tasks, here, _reset_elsewhere(self.spec, self.tasks, salt), strict=True):
                _require(
                    one.same_as(other),
                    f"task {task.id}: another process (PYTHONHASHSEED={salt}) begins with {other.text[:100]!r}, "
                    f"this one with {one.text[:100]!r}; is something drawn through hash() or a global generator?",
                )
        return f"{len(self.tasks)} tasks begin alike in other processes"

    def malformed(self) -> str:
        with closing(self.spec.make()) as env:
            env.reset(self.tasks[0])
            for action in MALFORMED:
                try:
                    step = env.step(action)
                except Exception as error:
                    raise _Broken(f"action {action[:40]!r} raised {error!r:.300}") from error
                _require_step(step, f"action {action[:40]!r}")
                if step.done:
                    env.reset(self.tasks[0])
        return f"{len(MALFORMED)} malformed actions answered"

    def pickling(self) -> str:
        for trace in self.traces:
            back: Trace = pickle.loads(pickle.dumps(trace))
            same = back.first.same_as(trace.first) and all(map(_same_step, back.steps, trace.steps))
            _require(same, f"task {trace.task.id}: observations or steps change when pickled")
        return "observations and steps survive pickling"

    def snapshot(self) -> str:
        if not self.spec.env_class().can_snapshot:
            raise _Skip("can_snapshot is False; branches are replayed")
        spent: list[float] = []
        with closing(self.spec.make()) as env, closing(self.spec.make()) as copy:
            for trace, stem, actions in self._forks(env):
                kept = env.snapshot()
                pickled = pickle.dumps(kept)
                _go_on(env, trace, stem, "after a snapshot was taken")
                for where, target, value in (
                    ("restored into another instance, after the original went on", copy, kept),
                    ("restored into the original, after it and a copy went on", env, kept),
                    ("restored into another instance, from its pickled form", copy, pickle.loads(pickled)),
                ):
                    start = time.perf_counter()
                    got = target.restore(value)
                    spent.append(time.perf_counter() - start)
                    at = f"task {trace.task.id}, {where}"
                    _require(got.same_as(stem.last), f"{at}: sees {got.text[:100]!r}, not {stem.last.text[:100]!r}")
                    _require(target.list_actions() == actions, f"{at}: other admissible actions")
                    _go_on(target, trace, stem, where)
        self.figures["branch_ms"] = 1000 * sum(spent) / len(spent)
        return "copies continue exactly as the original, wherever they are restored"

    def replay(self) -> str:
        if self.spec.env_class().can_snapshot:
            raise _Skip("can_snapshot is True; branches are copied")
        spent, steps = 0.0, 0
        with closing(self.spec.make()) as env, closing(self.spec.make()) as other:
            other.reset(self.tasks[0])  # a first reset may start a process, which is not what a branch costs
            for trace, stem, actions in self._forks(env):
                start = time.perf_counter()
                _repeat(other, stem, "a branch", actions)
                spent, steps = spent + time.perf_counter() - start, steps + len(stem.steps)
                _go_on(other, trace, stem, "replayed")
        self.figures["branch_ms"] = 1000 * spent / len(self.traces)
        return f"{len(self.traces)} branches, {steps} replayed steps, verified and continued exactly"

    def _forks(self, env: Env) -> Iterator[tuple[Trace, Trace, tuple[str, ...] | None]]:
        """Bring ``env`` to the middle of each episode; gives the whole, its first half and what is admissible there."""
        for trace in self.traces:
            half = len(trace.steps) // 2
            stem = Trace(trace.task, trace.first, trace.actions[:half], trace.steps[:half])
            _repeat(env, stem, "the parent's own path")
            yield trace, stem, env.list_actions()

    def expert(self) -> str:
        claimed = reached = 0
        with closing(self.spec.make()) as env:
            for task in self.tasks:
                actions = env.expert(task)
                if actions is None:
                    continue
                claimed += 1
                env.reset(task)
                last: Step | None = None
                for i, action in enumerate(actions, start=1):
                    _require(last is None or not last.done, f"task {task.id}: over before step {i} of its expert")
                    last = env.step(action)
                reached += bool(last and last.done and last.info.get("success"))
        if not claimed:
            raise _Skip(f"no expert for any of {len(self.tasks)} tasks")
        self.figures["expert_success"] = reached / len(self.tasks)
        _require(reached == claimed, f"the expert claims {claimed} tasks and solves {reached}")
        return f"solves {reached} of {len(self.tasks)} tasks, as claimed"


def first_observations(spec: EnvSpec, tasks: Sequence[Task]) -> list[Observation]:
    with closing(spec.make()) as env:
        return [env.reset(task) for task in tasks]


def _reset_elsewhere(spec: EnvSpec, tasks: Sequence[Task], salt: str) -> list[Observation]:
    """:func:`first_observations` in a new interpreter whose ``hash()`` is salted with ``salt``."""
    code = "import pickle, sys; seen = pickle.load(sys.stdin.buffer)(); pickle.dump(seen, open(sys.argv[1], 'wb'))"
    with tempfile.NamedTemporaryFile() as out:
        done = subprocess.run(
            [sys.executable, "-c", code, out.name],
            input=pickle.dumps(partial(first_observations, spec, tasks)),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": salt},
            capture_output=True,
            timeout=300,
            check=False,
        )
        said = done.stderr.decode(errors="replace")[-300:]
        _require(done.returncode == 0, f"a new process cannot reset it: {said}")
        return pickle.loads(out.read())


def _random_episode(env: Env, task: Task) -> Trace:
    """Random admissible actions, now and then one that is not (its answer is part of the state too), types verified.

    Where none are listed, the expert's are drawn from, or else an environment of free text would see empty ones alone.
    """
    rng, first, unlisted = random.Random(task.id), env.reset(task), MALFORMED[:2]
    _require_observation(first, "reset")
    if first.actions is None and env.list_actions() is None:
        unlisted += tuple(env.expert(task) or ())
        first = env.reset(task)
    trace = Trace(task, first)
    for _ in range(env.max_turns):
        admissible: Sequence[str] = trace.last.actions or env.list_actions() or unlisted
        action = INADMISSIBLE if rng.random() < 0.1 else rng.choice(admissible)
        step = env.step(action)
        _require_step(step, f"action {action[:40]!r}")
        _require(step.observation.goal == trace.first.goal, f"task {task.id}: the goal changed within the episode")
        trace.add(action, step)
        if step.done:
            break
    return trace


def _repeat(env: Env, trace: Trace, where: str, actions_at_end: tuple[str, ...] | None = None) -> None:
    """Replay a trace; a difference is a broken rule."""
    try:
        replay(env, trace, actions_at_end)
    except ReplayMismatch as mismatch:
        raise _Broken(f"{where}: {mismatch}") from mismatch


def _go_on(env: Env, trace: Trace, stem: Trace, where: str) -> None:
    """Execute what follows in ``trace`` after ``stem``; a difference is a broken rule."""
    done = len(stem.steps)
    for i, (action, recorded) in enumerate(zip(trace.actions[done:], trace.steps[done:], strict=True), done + 1):
        at = f"task {trace.task.id}, {where} at step {done}"
        _require(_same_step(env.step(action), recorded), f"{at}: differs at step {i}")


def _same_step(one: Step, other: Step) -> bool:
    return one.observation.same_as(other.observation) and one[1:4] == other[1:4]


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise _Broken(problem)


def _require_observation(seen: Any, where: str) -> None:
    _require(isinstance(seen, Observation), f"{where}: gave {type(seen).__name__}, not Observation")
    for name in ("text", "goal", "anchor", "action_guide"):
        _require(isinstance(getattr(seen, name), str), f"{where}: observation.{name} is not a str")
    _require(bool(seen.goal), f"{where}: observation.goal is empty")
    _require(bool(seen.text) or seen.image is not None, f"{where}: the observation shows neither text nor image")
    listed, image = seen.actions, seen.image
    holds = listed is None or (isinstance(listed, tuple) and all(isinstance(one, str) for one in listed))
    _require(holds, f"{where}: observation.actions is neither None nor a tuple of str")
    holds = image is None or (isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.shape[2:] == (3,))
    _require(holds, f"{where}: observation.image is neither None nor uint8 of shape (height, width, 3)")


def _require_step(step: Any, where: str) -> None:
    _require(isinstance(step, Step), f"{where}: gave {type(step).__name__}, not Step")
    _require_observation(step.observation, where)
    for name, kind in (("reward", float), ("terminated", bool), ("truncated", bool)):
        given = type(getattr(step, name))
        _require(given is kind, f"{where}: {name} is {given.__name__}, not {kind.__name__}")
    _require(bool(np.isfinite(step.reward)), f"{where}: reward is {step.reward}")
    _require(isinstance(step.info, Mapping), f"{where}: info is {type(step.info).__name__}, not a mapping")
