"""Written aside, then put in its place: a file or folder appears under its name whole, or not at all.

Invariants: what is being written has a hidden name (``.NAME.something``) in the same folder, so putting it in place is
one rename; what a kill leaves under such a name is removed, but for a whole folder that was about to be replaced, which
gets its name back.
"""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import BinaryIO


def write_atomic(path: Path, text: str) -> None:
    """Write ``path`` whole or not at all, even if the machine stops in between."""
    with replacing(path) as file:
        file.write(text.encode())


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of ``path`` once the block has ended well."""
    aside = _beside(path, "new")
    try:
        with aside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


@asynccontextmanager
async def placing(path: Path) -> AsyncIterator[Path]:
    """The name of a folder to make, which takes the place of ``path`` once the block has ended well.

    Otherwise it is removed, and with it what a process that has just been ended writes for a moment longer.
    """
    partial, old = _beside(path, "partial"), _beside(path, "old")
    clean(path.parent, path.name)
    try:
        yield partial
        if path.exists():
            path.rename(old)
        try:
            partial.rename(path)
        except BaseException:
            if old.exists():
                old.rename(path)
            raise
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        for _ in range(50):  # five seconds
            shutil.rmtree(partial, ignore_errors=True)
            if not partial.exists():
                break
            await asyncio.sleep(0.1)
        raise


def remove(folder: Path) -> None:
    """Remove a folder, if it is there, whole: no part of it is left under its name."""
    gone = _beside(folder, "gone")
    shutil.rmtree(gone, ignore_errors=True)
    if folder.exists():
        shutil.rmtree(folder.rename(gone), ignore_errors=True)


def clean(folder: Path, pattern: str) -> None:
    """Take back or remove what a kill left of folders whose names match."""
    for old in folder.glob(f".{pattern}.old"):
        if not (named := folder / old.name[1:].removesuffix(".old")).exists():
            old.rename(named)
    for what in ("partial", "old", "gone"):
        for left in folder.glob(f".{pattern}.{what}"):
            shutil.rmtree(left, ignore_errors=True)


def _beside(path: Path, what: str) -> Path:
    return path.with_name(f".{path.name}.{what}")
