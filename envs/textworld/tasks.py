"""TextWorld's tasks: which games there are, their ids and splits.

Invariants: an id ``"challenge-level-seed"`` says all there is to say about a game, so lists of ids need no package and
no data and are the same everywhere. No seed is in two splits. Lists go round the kinds of game, so that any prefix of a
split holds all of them evenly.
"""

import re
from typing import Any, NamedTuple

LEVELS: dict[str, tuple[int, ...]] = {
    "coin_collector": (5, 10, 105, 110),
    "treasure_hunter": (5, 10, 15, 20),
    "cooking": (1, 2, 3, 4),
}
"""Challenge -> the levels in the splits. Those of the first two are the package's own: 5 and 10 rooms in a row, then
with a dead end at each; a thing to find beside a wrong one in 5 rooms, then in 10 with doors and containers."""
COOKING: dict[int, dict[str, Any]] = {
    1: {"recipe": 1, "take": 1, "go": 1, "open": False, "cook": False, "cut": True},
    2: {"recipe": 1, "take": 1, "go": 1, "open": True, "cook": True, "cut": True},
    3: {"recipe": 1, "take": 1, "go": 9, "open": True, "cook": False, "cut": False},
    4: {"recipe": 3, "take": 3, "go": 6, "open": True, "cook": True, "cut": True},
}
"""Cooking has no levels of its own; these are ours. ``recipe`` ingredients of which ``take`` must be found in ``go``
rooms, behind closed doors and lids (``open``), to be cooked and cut."""
HIGHEST: dict[str, int] = {"coin_collector": 300, "treasure_hunter": 30, "cooking": max(COOKING)}
MAX_ROOMS = 100
"""Of a game for the Z-machine; limits the levels of coin_collector."""
SEEDS: dict[str, range] = {"train": range(1000), "test": range(1_000_000, 1_000_100)}
"""Split -> seeds of each kind of game. From the first test seed on, cooking uses the package's foods for tests."""
MAX_SEED = 2**31 - 1


class GameId(NamedTuple):
    challenge: str
    level: int
    seed: int

    @property
    def held_out(self) -> bool:
        return self.seed >= SEEDS["test"].start


def task_ids(split: str) -> list[str]:
    """Ids of ``"train"`` or ``"test"``, or of one challenge or kind of game, as in ``"cooking_test"`` or
    ``"cooking-2_train"``.

    Raises:
        ValueError: unknown split.
    """
    kinds, _, part = split.rpartition("_")
    challenge, _, level = kinds.partition("-")
    named = not kinds or (challenge in LEVELS and (not level or _is_level(challenge, level)))
    if part not in SEEDS or split.startswith("_") or not named:
        known = ", ".join([*SEEDS, *(f"{one}_{part}" for one in LEVELS for part in SEEDS)])
        raise ValueError(
            f"textworld has no split {split!r}; known: {known}, and those of one level, as in cooking-2_train"
        )
    chosen = [
        (name, one)
        for name, levels in LEVELS.items()
        if challenge in ("", name)
        for one in ([int(level)] if level else levels)
    ]
    return [f"{name}-{one}-{seed}" for seed in SEEDS[part] for name, one in chosen]


def parse_id(task_id: str) -> GameId:
    """Split an id into its checked parts; a seed that is in no split is as good.

    Raises:
        ValueError: not of that form, or an unknown challenge or level.
    """
    found = re.fullmatch(r"([a-z_]+)-([0-9]{1,3})-([0-9]{1,10})", task_id)
    if not found or found[1] not in LEVELS or not _is_level(found[1], found[2]) or int(found[3]) > MAX_SEED:
        levels = ", ".join(f"{name} 1 to {highest}" for name, highest in HIGHEST.items())
        raise ValueError(
            f"textworld has no task {task_id!r}; ids look like 'coin_collector-5-17' (challenge, level, seed). Levels: "
            f"{levels} (of coin_collector those of at most {MAX_ROOMS} rooms); seeds: 0 to {MAX_SEED}"
        )
    game = GameId(found[1], int(found[2]), int(found[3]))
    if task_id != "-".join(map(str, game)):
        raise ValueError(f"textworld: write the task {task_id!r} without leading zeros: '{'-'.join(map(str, game))}'")
    return game


def _is_level(challenge: str, level: str) -> bool:
    if not (level.isascii() and level.isdigit() and 1 <= int(level) <= HIGHEST[challenge]):
        return False
    around, length = divmod(int(level) - 1, 100)
    return challenge != "coin_collector" or (around + 1) * (length + 1) <= MAX_ROOMS
