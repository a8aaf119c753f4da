"""The files of a game, and whether they are whole.

Invariants: nothing here needs the package ``textworld``. A game is two files: its story for the Z-machine, and a record
with the generator's description of it and a digest of both, so that damage to either is seen.
"""

import hashlib
import json
from pathlib import Path
from typing import NamedTuple


class GameFiles(NamedTuple):
    story: Path
    record: Path

    @classmethod
    def of(cls, folder: Path, task_id: str) -> "GameFiles":
        return cls(folder / f"{task_id}.z8", folder / f"{task_id}.json")


class StoredGame(NamedTuple):
    story: Path
    text: str
    """The generator's description of the game, JSON."""
    digest: str
    """Of both; the game's identity."""


def digest(story: bytes | bytearray, text: str) -> str:
    return hashlib.sha256(bytes(story) + text.encode()).hexdigest()


def read(files: GameFiles) -> StoredGame:
    """Read a game's files.

    Raises:
        OSError, ValueError, KeyError, TypeError: a file is missing or damaged.
    """
    record = json.loads(files.record.read_bytes())
    found = digest(files.story.read_bytes(), record["game"])
    if found != record["digest"]:
        raise ValueError(f"textworld: {files.story} is damaged")
    return StoredGame(files.story, record["game"], found)


def is_whole(files: GameFiles) -> bool:
    try:
        read(files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return True
