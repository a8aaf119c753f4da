"""Games on disk: made when first asked for, kept, and made anew where damaged.

Invariants: games are made by ``generate`` in a process of its own, so that nothing a worker did can change them, and
every wait for it has a bound. A folder holds the games of one version of the package.

    python -m envs.textworld.cache SPLIT COUNT

makes the first games of a split in advance, all in one process, which takes a third of the time.
"""

import importlib.util
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from envs.data_home import data_folder
from envs.textworld.files import GameFiles, StoredGame, is_whole, read
from envs.textworld.tasks import parse_id, task_ids

INSTALL = "pip install 'asyncrl[textworld]' (it compiles C: gcc and make are needed)"
MAKE_TIMEOUT_S = 300.0
"""Longest wait for one game, whoever makes it: about 10 s of processor time where nothing else is made before it."""


def require_package() -> None:
    """Raises ValueError: TextWorld, or the interpreter it plays its games with, is not installed."""
    for name in ("textworld", "jericho"):
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"textworld: the package {name!r} is not installed; install it with: {INSTALL}")


def game_folder(given: str | None = None) -> Path:
    """Where the games of the installed version lie; see ``data_folder``."""
    return data_folder("textworld", given) / version("textworld")


def find_game(folder: Path, task_id: str) -> StoredGame:
    """The game of a task, made where it is missing or damaged.

    Raises:
        ValueError: not a task id.
        RuntimeError: it cannot be made.
    """
    parse_id(task_id)
    files = GameFiles.of(folder, task_id)
    if not is_whole(files):
        make_games(folder, [task_id])
    return read(files)


def make_games(folder: Path, ids: list[str]) -> None:
    """Make those games that are missing or damaged.

    Raises:
        RuntimeError: one cannot be made, or not in time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    where, bound = f"games of {ids[0]} (and {len(ids) - 1} more) in {folder}", MAKE_TIMEOUT_S * len(ids)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "envs.textworld.generate", str(folder), *ids],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONHASHSEED": "0"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=bound,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"textworld: making {where} took more than {bound:.0f} s; is the machine busy?") from error
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()[-500:]
        raise RuntimeError(f"textworld: making {where} failed (exit code {done.returncode}): {said}")


if __name__ == "__main__":
    require_package()
    make_games(game_folder(), task_ids(sys.argv[1])[: int(sys.argv[2])])
