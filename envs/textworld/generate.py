"""Make games: ``python -m envs.textworld.generate FOLDER ID...``; ``cache`` starts this.

Invariants:

* A game is a pure function of its id. It is made in a process of its own, whose ``hash()`` is not salted (the generator
  iterates over sets) and whose ``glob`` sorts (it reads its grammars in the file system's order); every generator is
  seeded from the id, and the date that the compiler writes into a game is blanked.
* A game appears whole or not at all, and is made once however many processes want it: one holds its lock, which ends
  with that process however it ends, and clears what a killed one left.
"""

import fcntl
import glob
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from envs.textworld.files import GameFiles, digest, is_whole
from envs.textworld.tasks import COOKING, GameId, parse_id

NEXT_TRY = 10_007
"""Added to the seed where the generator finds no quest in the map it drew (some of treasure_hunter's)."""
TRIES = 20
SERIAL = slice(18, 24)
"""Where a Z-machine story has the date of its compilation; its checksum does not cover it."""


def main(folder: Path, ids: list[str]) -> None:
    _sort_globs()
    for one in ids:
        files = GameFiles.of(folder, one)
        with (folder / f".{one}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not is_whole(files):
                make(parse_id(one), files, folder / f".{one}.partial")


def make(game_id: GameId, files: GameFiles, aside: Path) -> None:
    """Make one game in the folder ``aside`` and put its files in their places, the one that vouches for both last."""
    from textworld.generator import compile_game

    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        game, options = _generate(game_id)
        _ = game.walkthrough  # so that it is saved with the game
        options.path = str(aside / "game.z8")
        compile_game(game, options)
        story = bytearray((aside / "game.z8").read_bytes())
        story[SERIAL] = b"000000"
        text = (aside / "game.json").read_text()
        new_story, new_record = aside / "story", aside / "record"
        new_story.write_bytes(story)
        new_record.write_text(json.dumps({"digest": digest(story, text), "game": text}))
        new_story.replace(files.story)
        new_record.replace(files.record)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _sort_globs() -> None:
    as_found = glob.glob

    def in_order(*args: Any, **options: Any) -> list[Any]:
        return sorted(as_found(*args, **options))

    glob.glob = in_order


def _generate(game_id: GameId) -> tuple[Any, Any]:
    """The game and the options it was made with."""
    import textworld
    from textworld.challenges import CHALLENGES
    from textworld.generator import QuestGenerationError

    _, generate, _ = CHALLENGES[f"tw-{game_id.challenge}"]
    for attempt in range(TRIES):
        seed = (game_id.seed + attempt * NEXT_TRY) % 2**32
        textworld.g_rng.set_seed(seed)  # nothing should draw from it; if something does, it is the same everywhere
        options = textworld.GameOptions()
        options.seeds = seed
        options.grammar.only_last_action = True  # the goal says what to find, not the whole way to it
        settings: dict[str, Any] = {"level": game_id.level}
        if game_id.challenge == "cooking":
            foods = "test" if game_id.held_out else "train"
            settings = COOKING[game_id.level] | {"drop": False, "split": foods, "recipe_seed": seed + 1}
        try:
            return generate(settings, options), options
        except QuestGenerationError as error:
            failure = error
    raise RuntimeError(f"textworld: no game for {'-'.join(map(str, game_id))} in {TRIES} tries: {failure}")


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        raise SystemExit("textworld: set PYTHONHASHSEED=0, or the games are not those of their ids")
    main(Path(sys.argv[1]), sys.argv[2:])
