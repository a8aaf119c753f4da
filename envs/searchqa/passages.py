"""A corpus of passages as one file of JSON lines.

Invariants: a corpus never changes once opened; only the lines' places are kept in memory, so corpora of many gigabytes
open too; passages may be read from several threads at once. A line without an id or a text is answered with a
``ValueError`` that names file and line.
"""

import json
import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Passage(NamedTuple):
    id: str
    contents: str
    """The quoted title on a line of its own where there is one, then the text, as Search-R1 has it."""


def passage(record: Mapping[str, Any]) -> Passage:
    """A record ``{id, contents}``, ``{id, title, text}`` or ``{id, text}``.

    Raises:
        ValueError: it has no id or no text.
    """
    try:
        contents = record.get("contents")
        if contents is None:
            title, text = record.get("title"), record["text"]
            contents = f'"{title}"\n{text}' if title else text
        if not (isinstance(contents, str) and contents.strip()):
            raise ValueError("'contents' (or 'text') must be a text that is not empty")
        return Passage(str(record["id"]), contents)
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"expected an object with 'id' and 'contents', or 'id', 'title' and 'text': {error!r}"
        ) from None


class Corpus:
    """The passages of a file, by number.

    Args:
        starts: place in bytes of every line, int64; None finds them, which reads the file once.

    Raises:
        ValueError: the file is missing or holds no passage.
    """

    def __init__(self, path: Path, starts: NDArray[np.int64] | None = None) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                # Slices of a map, not seeks in a file: slots on several threads read it at once.
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ValueError(f"corpus {path}: cannot be read ({error}); give a file of JSON lines") from error
        self.starts = self._find_starts() if starts is None else starts
        if not len(self.starts):
            raise ValueError(f"corpus {path}: holds no passage; give a file of JSON lines")

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, number: int) -> Passage:
        start = int(self.starts[number])
        end = self._bytes.find(b"\n", start)
        try:
            return passage(json.loads(self._bytes[start : end if end >= 0 else len(self._bytes)]))
        except ValueError as error:
            raise ValueError(f"corpus {self.path}: passage {number} is damaged: {error}") from error

    def __iter__(self) -> Iterator[Passage]:
        return (self[number] for number in range(len(self)))

    def _find_starts(self) -> NDArray[np.int64]:
        starts, at = [], 0
        for line in iter(self._bytes.readline, b""):
            if line.strip():
                starts.append(at)
            at += len(line)
        return np.array(starts, np.int64)
