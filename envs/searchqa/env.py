"""Search QA: answer a question, after asking a search engine as often as needed (Search-R1, T2PO).

Invariants:

* A task is a row of a question file (:mod:`envs.searchqa.questions`); ``Task.seed`` changes nothing.
* The state is the task, the number of turns, what is in view and whether it is over: a snapshot is that, a few
  kilobytes. Questions and retriever are read-only and shared by all slots of a process.
* Only the agent's own answer is scored; an ``<answer>`` that stands in a passage is text like any other.
* Making the environment looks for the files; the first ``reset`` reads the questions, the first search the index. A
  retriever that fails raises: it is neither an observation nor a score.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from asyncrl.env import Env
from asyncrl.types import Moves, Observation, Step, Task
from envs.data_home import data_folder
from envs.searchqa.client import Service, find_retriever, shared
from envs.searchqa.index import Hit
from envs.searchqa.questions import PARTS, REMEDY, Question, find_file, find_question, task_ids
from envs.searchqa.score import exact_match

SAMPLE = Path(__file__).parent / "sample"
"""Questions and a corpus of our own, which come with the package."""
LONGEST_QUERY = 1000
"""Characters of a query that are searched for."""
GUIDE = "<search>a query</search> or <answer>the answer</answer>"
_MOVE = re.compile(r"\s*<(search|answer)>(.*)</\1>\s*", re.IGNORECASE | re.DOTALL)


class _State(NamedTuple):
    task: Task
    turns: int
    text: str
    over: bool


class SearchQA(Env):
    """One question. Task ids are ``"nq/test/17"``: set, part, row.

    The reward is 1.0 for an answer that matches exactly (SQuAD's normalisation), else 0. The last step's ``info`` has
    ``success`` and ``answer``.

    Args:
        data: folder with the question files; ``"sample"`` is the one that comes with the package;
            ``$ASYNCRL_DATA/searchqa`` or ``~/.cache/asyncrl/searchqa`` when None.
        retriever: address of a service, index folder, or corpus file; when None ``$ASYNCRL_RETRIEVER``, else ``index``
            or ``corpus.jsonl`` in the data folder.
        topk: passages of a search.
        max_turns: turns of an episode.
        timeout_s: of one try to reach a service.
        retries: further tries.

    Raises:
        ValueError: a bad option, or no questions or no retriever are there.
    """

    role: ClassVar[str] = "You are an expert agent who answers a question step by step, with a search engine to ask."
    max_turns: ClassVar[int] = 4
    can_snapshot: ClassVar[bool] = True
    moves: ClassVar[Moves] = "search"

    def __init__(
        self,
        data: str | None = None,
        retriever: str | None = None,
        topk: int = 3,
        max_turns: int = 4,
        timeout_s: float = 10.0,
        retries: int = 3,
    ) -> None:
        for name, given, least in (("max_turns", max_turns, 1), ("topk", topk, 1), ("retries", retries, 0)):
            if given < least:
                raise ValueError(f"searchqa: {name} must be at least {least}, got {given}")
        if timeout_s <= 0:
            raise ValueError(f"searchqa: timeout_s must be above 0, got {timeout_s}")
        self.max_turns = max_turns  # type: ignore[misc]  # the option overrides the class's default for this slot
        self._folder = SAMPLE if data == "sample" else data_folder("searchqa", data)
        if not any((self._folder / file).is_file() for part in PARTS.values() for file in part.files):
            raise ValueError(f"searchqa: {self._folder} holds no questions; {REMEDY}")
        own = retriever is None and data == "sample"  # it has a corpus of its own, whatever the variable says
        self._service = Service(find_retriever(self._folder, "" if own else retriever), timeout_s, retries)
        self._topk, self._state = topk, _State(Task("searchqa", ""), 0, "", True)

    @classmethod
    def tasks(cls, split: str) -> Sequence[str]:
        return task_ids(split)

    def check_splits(self, *splits: str) -> None:
        """Look for the files of splits; reads none.

        Raises:
            ValueError: one is missing, or an unknown split.
        """
        for part in dict.fromkeys(one.rpartition("/")[0] for split in splits for one in task_ids(split)):
            find_file(self._folder, part)

    def reset(self, task: Task) -> Observation:
        return self.restore(_State(task, 0, find_question(self._folder, task.id).text, False))

    def step(self, action: str) -> Step:
        state = self._state
        if state.over:
            raise RuntimeError("searchqa: the episode is over; call reset first")
        move = _MOVE.fullmatch(action)
        kind, body = (move[1].lower(), _clean(move[2])) if move else ("", "")
        info: dict[str, Any] = {}
        if kind == "answer" and body:
            info = {"success": exact_match(body, self._question.golden), "answer": body}
            text = "The answer was handed in."
        elif kind == "search" and body:
            text = _result(shared(self._service).ask(body[:LONGEST_QUERY], self._topk))
        else:
            text = _told(
                "Nothing was done: write a query between the search tags or an answer between the answer tags."
            )
        answered, turns = bool(info), state.turns + 1
        spent = not answered and turns >= self.max_turns
        if spent:
            info = {"success": False, "answer": ""}
        self._state = _State(state.task, turns, text, answered or spent)
        return Step(self._observe(), float(info.get("success", False)), answered, spent, info)

    def snapshot(self) -> tuple[Task, int, str, bool]:
        return self._state

    def restore(self, snapshot: tuple[Task, int, str, bool]) -> Observation:
        self._state = _State(*snapshot)
        return self._observe()

    def expert(self, task: Task) -> list[str]:
        """Search for the question as it stands, then give the first golden answer."""
        self.reset(task)
        actions = [f"<search>{self._question.text}</search>", f"<answer>{self._question.golden[0]}</answer>"]
        return actions[-self.max_turns :]

    @property
    def _question(self) -> Question:
        return find_question(self._folder, self._state.task.id)

    def _observe(self) -> Observation:
        return Observation(self._state.text, self._question.text, action_guide=GUIDE)


def _clean(text: str) -> str:
    """A move's words in one line; half a surrogate pair, which no encoder takes, becomes a question mark."""
    return " ".join(text.encode("utf-8", "replace").decode().split())


def _result(hits: Sequence[Hit]) -> str:
    found = "\n".join(f"Doc {i}: {hit.passage.contents.strip()}" for i, hit in enumerate(hits, start=1))
    return _told(found or "Nothing was found; try other words.")


def _told(text: str) -> str:
    return json.dumps({"result": text}, ensure_ascii=False)
