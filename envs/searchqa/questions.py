"""Search QA's questions: the seven sets, their splits, and how a file of them is read.

Invariants:

* Splits are made here and nowhere else, from a table of counts: they need no data and are the same on every worker. A
  task id ``"set/part/17"`` is row 17 of that part's file, counted from 0.
* A file is read once a process and shared; one that is missing, damaged or has another number of rows than published is
  answered with one ``ValueError`` that names it and the remedy.

Source: training on NQ and HotpotQA and testing on all seven is Search-R1's split, which T2PO uses; the files are those
of FlashRAG's collection, which Search-R1's own are made from.
"""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

HUB = "RUC-NLPIR/FlashRAG_datasets"
"""Data set repository on the Hugging Face Hub that holds the published files under the names below."""
REMEDY = (
    "asyncrl data fetch searchqa brings the published files; the option 'data' or the variable ASYNCRL_DATA names "
    "another place"
)

SAMPLE_REMEDY = (
    "put it there (lines of {question, golden_answers}), name another folder with the option 'data' or the variable "
    "ASYNCRL_DATA, or take the splits train and test"
)


class Part(NamedTuple):
    rows: int
    files: tuple[str, ...]
    """Names below the data folder; the first that is there is read, the published one comes first."""


PARTS: dict[str, Part] = {
    "nq/train": Part(79168, ("nq/train.jsonl",)),
    "hotpotqa/train": Part(90447, ("hotpotqa/train.jsonl",)),
    "musique/train": Part(19938, ("musique/train.jsonl", "musique_train_19938.jsonl")),
    "nq/test": Part(3610, ("nq/test.jsonl", "nq_dev.jsonl")),
    "triviaqa/test": Part(11313, ("triviaqa/test.jsonl",)),
    "popqa/test": Part(14267, ("popqa/test.jsonl",)),
    "hotpotqa/dev": Part(7405, ("hotpotqa/dev.jsonl", "hotpotqa_dev_7405.jsonl")),
    "2wikimultihopqa/dev": Part(12576, ("2wikimultihopqa/dev.jsonl", "2wiki_dev_12576.jsonl")),
    "musique/dev": Part(2417, ("musique/dev.jsonl", "musique_dev_2417.jsonl")),
    "bamboogle/test": Part(125, ("bamboogle/test.jsonl", "bamboogle_125.jsonl")),
    # Samples whose passages fit into a corpus of some thousands, so that no 21-million-passage index is needed.
    "small/nq": Part(1000, ("nq_1000.jsonl",)),
    "small/triviaqa": Part(1000, ("triviaqa_1000.jsonl",)),
    "small/popqa": Part(1000, ("popqa_1000.jsonl",)),
    "small/2wikimultihopqa": Part(1549, ("2wiki_covered_by_corpus.jsonl",)),
    "small/hotpotqa": Part(100, ("hotpotqa_100_with_paragraphs.jsonl",)),
    # Our own, about places that do not exist; it comes with the package.
    "sample/isles": Part(96, ("isles.jsonl",)),
}
TRAIN = ("nq/train", "hotpotqa/train")
TEST = tuple(name for name in PARTS if name.endswith(("/test", "/dev")))


class Question(NamedTuple):
    text: str
    golden: tuple[str, ...]
    """Answers that count as right."""


def task_ids(split: str) -> list[str]:
    """Ids of a split: ``train`` and ``test``; ``small_*`` and ``sample_*``, of which every fifth row is for testing; or
    one part by its name, e.g. ``nq/test``.

    Raises:
        ValueError: unknown split.
    """
    whole = {"train": TRAIN, "test": TEST, **{name: (name,) for name in PARTS}}
    family, _, half = split.partition("_")
    if split in whole:
        return [f"{name}/{row}" for name in whole[split] for row in range(PARTS[name].rows)]
    if family in ("small", "sample") and half in ("train", "test"):
        names = [name for name in PARTS if name.startswith(f"{family}/")]
        rows = ((name, row) for name in names for row in range(PARTS[name].rows))
        return [f"{name}/{row}" for name, row in rows if (row % 5 == 0) == (half == "test")]
    known = ["train", "test", "small_train", "small_test", "sample_train", "sample_test", *PARTS]
    raise ValueError(f"searchqa: no split {split!r}; known: {', '.join(known)}")


def find_question(folder: Path, task_id: str) -> Question:
    """The question of a task id.

    Raises:
        ValueError: no such id, or its file is missing, damaged or incomplete.
    """
    name, _, row = task_id.rpartition("/")
    part = PARTS.get(name)
    if part is None or not (row.isascii() and row.isdigit() and int(row) < part.rows):
        raise ValueError(f"searchqa: no task {task_id!r}; ids look like 'nq/test/17', rows are counted from 0")
    with _loading:
        return load(find_file(folder, name), part.rows)[int(row)]


def find_file(folder: Path, name: str) -> Path:
    """The file of a part; reads nothing.

    Raises:
        ValueError: it is missing.
    """
    found = next((folder / file for file in PARTS[name].files if (folder / file).is_file()), None)
    if found is None:
        remedy = SAMPLE_REMEDY if name.startswith(("small/", "sample/")) else REMEDY
        raise ValueError(f"searchqa: {folder / PARTS[name].files[0]} is missing; {remedy}")
    return found


_loading = Lock()


@cache
def load(path: Path, rows: int) -> tuple[Question, ...]:
    """All questions of a file.

    Raises:
        ValueError: damaged, or not ``rows`` questions.
    """
    try:
        found = tuple(_read(path))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"searchqa: {path} is damaged ({error}); {REMEDY}") from error
    if len(found) != rows:
        raise ValueError(f"searchqa: {path} holds {len(found)} questions, the published file {rows}; {REMEDY}")
    return found


def _read(path: Path) -> Iterator[Question]:
    for number, line in enumerate(path.read_text("utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record: dict[str, Any] = json.loads(line)
            text, golden = record["question"].strip(), record["golden_answers"]
            golden = (golden,) if isinstance(golden, str) else tuple(golden)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"line {number}: {error!r}") from error
        if not (text and golden and all(isinstance(one, str) for one in golden)):
            raise ValueError(f"line {number}: 'question' must be a text and 'golden_answers' a list of texts")
        yield Question(text, golden)
