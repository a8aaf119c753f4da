"""ScienceWorld: elementary-science tasks in a text world, on the real simulator (ScienceWorld 1.2.3, Wang et al. 2022).

Invariants:

* One environment holds at most one JVM, started at its first ``reset`` and ended by ``close``; the simulator has static
  state, so two live episodes never share a JVM. Busy JVMs beyond the number of cores make everything slower.
* Making the environment starts nothing, but refuses a bad option or a machine without Java.
* A task's variation seeds the simulator, so ``Task.seed`` changes nothing. Episodes are deterministic under the JVM
  flags of ``scienceworld_jvm``, across JVMs with different histories; branching is by verified replay.
* The simulator names an object at random where several names fit, so listing actions would move its generator on and
  change both later lists and what happens by chance. Here the generator is seeded before every step, by variation and
  turn, and before every list: a list depends on the state alone, and making one changes nothing.
* Valid actions (hundreds to thousands of strings, 50 ms and more) are computed only when asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from asyncrl.env import Env
from asyncrl.types import Observation, Step, Task
from envs.scienceworld_host import SimulatorError, SimulatorLost, java_home, simulator_jar
from envs.scienceworld_splits import parse_id, task_ids

if TYPE_CHECKING:
    from envs.scienceworld_jvm import Jvm

MOVE_LIMIT = 100
"""Simulator moves of an episode (``envStepLimit`` of the papers). Looking costs none, ``wait`` costs ten."""
LISTING_SEED = 1
MAX_ACTION = 500
"""Characters of an action that reach the simulator; no valid action is nearly as long."""


class ScienceWorld(Env):
    """One ScienceWorld slot. Task ids are ``"task-name/variation"``, e.g. ``"boil/3"``.

    The reward is 1.0 on the step that brings the score to 100 and 0 everywhere else; ``info["score"]`` holds the
    simulator's score (-100..100) and ``info["moves"]`` its move count. A negative score ends the episode. The last
    step's ``info`` has ``success`` (score 100) and ``spark_success`` (SPARK's rule: the simulator's end, at any score
    above 0).

    Args:
        max_turns: turns of an episode; SPARK gives its agents 30.
        simplifications: the simulator's simplifications, comma separated.
        action_guide: put action templates and the objects in reach into every observation (about 5 ms).
        java: folder of the Java runtime; found by ``java_home`` when None.

    Raises:
        ValueError: a bad option, no Java, or no ``scienceworld`` package.
    """

    role: ClassVar[str] = (
        "You are an expert agent in ScienceWorld, a text world where elementary-school science is done by hand: "
        "you move between rooms, handle objects and instruments, and carry out experiments."
    )
    max_turns: ClassVar[int] = 30

    def __init__(
        self,
        max_turns: int = 30,
        simplifications: str = "easy",
        action_guide: bool = False,
        java: str | None = None,
    ) -> None:
        if max_turns < 1:
            raise ValueError(f"scienceworld: max_turns must be at least 1, got {max_turns}")
        self.max_turns = max_turns  # type: ignore[misc]  # the option overrides the class's default for this slot
        self._simplifications = simplifications
        self._guides = action_guide
        self._java, self._jar = java_home(java), simulator_jar()
        self._jvm: Jvm | None = None
        self._goal = ""
        self._variation = self._turns = 0
        self._live = False

    @classmethod
    def tasks(cls, split: str) -> Sequence[str]:
        return task_ids(split)

    @classmethod
    def preflight(cls) -> None:
        """Raise ``ValueError`` where Java or the simulator is missing; starts nothing."""
        java_home()
        simulator_jar()

    def reset(self, task: Task) -> Observation:
        self._load(task, gold=False)
        return self._observe(self._act("look around"))

    def step(self, action: str) -> Step:
        if not self._live:
            raise RuntimeError("scienceworld: the episode is over or was never begun; call reset first")
        try:
            text = self._act(_clean(action))
        except SimulatorError:
            text = "That cannot be done."
        score = round(100 * self._call("getScore"))
        moves = int(self._call("getNumMoves"))
        self._turns += 1
        terminated = bool(self._call("getCompleted")) or score < 0
        out_of_moves = moves > MOVE_LIMIT
        truncated = not terminated and (out_of_moves or self._turns >= self.max_turns)
        info: dict[str, Any] = {"score": score, "moves": moves}
        success = terminated and score == 100
        if terminated or truncated:
            self._live = False
            info["success"] = success
            info["spark_success"] = (terminated or out_of_moves) and score > 0
        return Step(self._observe(text), float(success), terminated, truncated, info)

    def list_actions(self) -> tuple[str, ...]:
        """All valid actions with their objects, sorted."""
        return tuple(sorted(set(self._list("getValidActionObjectCombinations"))))

    def expert(self, task: Task) -> list[str] | None:
        """The simulator's gold path, cut where it succeeds; None where it does not within ``max_turns``.

        The path is executed to know. Making it takes seconds for most tasks and about 20 s for genetics; for both
        genetics tasks, and some variations of ``inclined-plane-friction-unnamed-surfaces``, it exceeds the move limit.
        """
        gold = self.gold_path(task)
        self.reset(task)
        found = None
        for count, action in enumerate(gold, start=1):
            step = self.step(action)
            if step.done:
                found = gold[:count] if step.info["success"] else None
                break
        self.reset(task)
        return found

    def gold_path(self, task: Task) -> list[str]:
        """The simulator's own solution, whether or not it works within the limits; no episode is begun."""
        self._load(task, gold=True)
        self._live = False
        return self._list("getGoldActionSequence")

    def close(self) -> None:
        self._live = False
        if self._jvm is not None:
            self._jvm.close()
            self._jvm = None

    def _load(self, task: Task, gold: bool) -> None:
        name, self._variation = parse_id(task.id)
        if self._jvm is None:
            from envs.scienceworld_jvm import Jvm  # needs py4j, which a machine without the extra lacks

            self._jvm = Jvm(self._java, self._jar)
        # ``load`` alone gives the state that the package's load + reset gives; its reset also searches the gold path,
        # which takes up to 20 s. tests/integration/test_scienceworld.py compares the two.
        self._call("load", name, self._variation, self._simplifications, gold)
        self._goal = str(self._call("getTaskDescription"))
        self._turns, self._live = 0, True

    def _act(self, action: str) -> str:
        with self._live_jvm() as jvm:
            jvm.seed(_mix(self._variation, self._turns))
            return str(jvm.call("step", action))

    def _observe(self, text: str) -> Observation:
        return Observation(text=text, goal=self._goal, action_guide=self._guide() if self._guides else "")

    def _guide(self) -> str:
        templates = ", ".join(sorted(set(self._list("getPossibleActions")) - {"reset task", "task"}))
        objects = ", ".join(sorted(set(self._list("getPossibleObjects"))))
        return f"{templates}\nOBJ is one of: {objects}"

    def _call(self, method: str, *args: object) -> Any:
        with self._live_jvm() as jvm:
            return jvm.call(method, *args)

    def _list(self, method: str) -> list[str]:
        with self._live_jvm() as jvm:
            jvm.seed(LISTING_SEED)
            return jvm.call_list(method)

    @contextmanager
    def _live_jvm(self) -> Iterator[Jvm]:
        """The JVM; when it is lost the slot forgets it, so that the next ``reset`` starts another."""
        if self._jvm is None:
            raise RuntimeError("scienceworld: nothing is running; call reset first")
        try:
            yield self._jvm
        except SimulatorLost:
            self.close()
            raise


def _mix(variation: int, turn: int) -> int:
    """A 48-bit seed; Java's generator begins alike from neighbouring seeds, so they are spread (Knuth's constant)."""
    return ((variation << 16 | turn) * 0x9E3779B97F4A7C15 >> 8) & (2**48 - 1)


def _clean(action: str) -> str:
    """At most ``MAX_ACTION`` characters of valid Unicode; what the simulator makes of them is its answer."""
    return action[:MAX_ACTION].encode("utf-8", "replace").decode("utf-8")
