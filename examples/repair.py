"""Repair: a machine has one worn part. Its symptom hints at which; what hints at what is there to be found out."""

import random
from typing import Any

from asyncrl.env import Env
from asyncrl.types import Observation, Step, Task

CAUSES = {"rattles": "gear", "smokes": "fuse", "leaks": "seal", "hums": "pump", "stalls": "filter", "sparks": "cable"}
PARTS = sorted(CAUSES.values())
ACTIONS = (*(f"inspect {part}" for part in PARTS), "replace part")
SPLITS = {"train": range(2000), "test": range(2000, 2200)}


class Repair(Env):
    role = "You repair machines: find the worn part, then replace it. Replacing before it is found wastes the spare."
    max_turns = 4
    can_snapshot = True

    def __init__(self, turns: int = 4) -> None:
        self.max_turns = turns  # type: ignore[misc]  # an option: who demonstrates may take longer

    @classmethod
    def tasks(cls, split: str) -> list[str]:
        if split not in SPLITS:
            raise ValueError(f"repair: no split {split!r}; known: {', '.join(SPLITS)}")
        return [str(i) for i in SPLITS[split]]

    def reset(self, task: Task) -> Observation:
        rng = random.Random(f"{task.id}/{task.seed}")
        symptom, likely = rng.choice(list(CAUSES.items()))
        worn = likely if rng.random() < 0.9 else rng.choice(PARTS)
        order = rng.sample(PARTS, len(PARTS))  # in which the expert looks
        return self.restore((worn, order, 0, f"The machine {symptom}."))

    def step(self, action: str) -> Step:
        result, replaced = "Nothing happens.", action == "replace part"
        if action in ACTIONS[:-1]:
            result = f"The {action.split()[1]} is {'worn' if action.endswith(self.worn) else 'fine'}."
        success, truncated = replaced and self.worn in self.text, not replaced and self.turns + 1 == self.max_turns
        seen = self.restore((self.worn, self.order, self.turns + 1, f"{self.text} {result}"))
        return Step(seen, float(success), replaced, truncated, {"success": success} if replaced or truncated else {})

    def snapshot(self) -> tuple[str, list[str], int, str]:
        return self.worn, self.order, self.turns, self.text

    def restore(self, snapshot: Any) -> Observation:
        self.worn, self.order, self.turns, self.text = snapshot
        return Observation(self.text, "repair the machine", ACTIONS)

    def expert_action(self) -> str:
        unknown = [part for part in self.order if part not in self.text]
        return "replace part" if self.worn in self.text else f"inspect {unknown[0]}"

    def expert(self, task: Task) -> list[str] | None:
        self.reset(task)
        looks = self.order[: self.order.index(self.worn) + 1]
        actions = [*(f"inspect {part}" for part in looks), "replace part"]
        return actions if len(actions) <= self.max_turns else None
