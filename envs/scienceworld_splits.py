"""ScienceWorld's tasks and the papers' splits.

Invariants: the lists are made by rule, need no Java, and are the same everywhere. Of a task with V variations the first
2*floor(V/4) train, the next floor(V/4) are "dev", the rest are "test" (this is not the package's own division).
``use-thermometer`` is in no split. Lists go round the tasks, so that any prefix of a split holds all its tasks evenly.

Source: SPARK's levels L0 (same tasks, dev variations), L1 (same tasks, test variations), L2 (unseen tasks).
"""

from collections.abc import Iterable, Sequence

VARIATIONS: dict[str, int] = {
    "boil": 30,
    "change-the-state-of-matter-of": 30,
    "chemistry-mix": 32,
    "chemistry-mix-paint-secondary-color": 36,
    "chemistry-mix-paint-tertiary-color": 36,
    "find-animal": 300,
    "find-living-thing": 300,
    "find-non-living-thing": 300,
    "find-plant": 300,
    "freeze": 30,
    "grow-fruit": 126,
    "grow-plant": 126,
    "identify-life-stages-1": 14,
    "identify-life-stages-2": 10,
    "inclined-plane-determine-angle": 168,
    "inclined-plane-friction-named-surfaces": 1386,
    "inclined-plane-friction-unnamed-surfaces": 162,
    "lifespan-longest-lived": 125,
    "lifespan-longest-lived-then-shortest-lived": 125,
    "lifespan-shortest-lived": 125,
    "measure-melting-point-known-substance": 436,
    "measure-melting-point-unknown-substance": 300,
    "melt": 30,
    "mendelian-genetics-known-plant": 120,
    "mendelian-genetics-unknown-plant": 480,
    "power-component": 20,
    "power-component-renewable-vs-nonrenewable-energy": 20,
    "test-conductivity": 900,
    "test-conductivity-of-unknown-substances": 600,
    "use-thermometer": 540,
}
"""Task name -> number of variations, in the simulator's order."""

_IN_SPLITS = [name for name in VARIATIONS if name != "use-thermometer"]
_UNSEEN_IN_L2 = {1, 4, 8, 11, 13, 16, 18, 21, 24, 28}
_L2_TRAIN = [name for index, name in enumerate(_IN_SPLITS) if index not in _UNSEEN_IN_L2]
_L2_TEST = [name for index, name in enumerate(_IN_SPLITS) if index in _UNSEEN_IN_L2]

_SPLITS: dict[str, tuple[list[str], str]] = {
    "L0_train": (_IN_SPLITS, "train"),
    "L0_test": (_IN_SPLITS, "dev"),
    "L1_train": (_IN_SPLITS, "train"),
    "L1_test": (_IN_SPLITS, "test"),
    "L2_train": (_L2_TRAIN, "train"),
    "L2_test": (_L2_TEST, "test"),
}
_ALIASES = {"train": "L0_train", "test": "L0_test"}


def task_ids(split: str) -> list[str]:
    """Ids ``"task-name/variation"`` of a split, going round the tasks.

    Raises:
        ValueError: unknown split.
    """
    try:
        names, part = _SPLITS[_ALIASES.get(split, split)]
    except KeyError:
        known = ", ".join([*_SPLITS, *_ALIASES])
        raise ValueError(f"scienceworld has no split {split!r}; known: {known}") from None
    return go_round((name, _part(VARIATIONS[name], part)) for name in names)


def parse_id(task_id: str) -> tuple[str, int]:
    """Split ``"task-name/variation"`` into its checked parts.

    Raises:
        ValueError: not of that form, an unknown task, or a variation the task does not have.
    """
    name, _, number = task_id.partition("/")
    if name not in VARIATIONS:
        raise ValueError(f"scienceworld has no task {name!r} (id {task_id!r}); known: {', '.join(VARIATIONS)}")
    if not (number.isascii() and number.isdigit() and int(number) < VARIATIONS[name]):
        raise ValueError(f"scienceworld id {task_id!r}: expected '{name}/v' with v from 0 to {VARIATIONS[name] - 1}")
    return name, int(number)


def _part(variations: int, part: str) -> range:
    quarter = variations // 4
    bounds = {"train": (0, 2 * quarter), "dev": (2 * quarter, 3 * quarter), "test": (3 * quarter, variations)}
    return range(*bounds[part])


def go_round(lists: Iterable[tuple[str, Sequence[int]]]) -> list[str]:
    """Ids from (name, variations) pairs: the first of each, then the second of each that has one, and so on."""
    ranked = ((turn, name, variation) for name, part in lists for turn, variation in enumerate(part))
    return [f"{name}/{variation}" for _, name, variation in sorted(ranked, key=lambda item: item[0])]
