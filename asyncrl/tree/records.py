"""``trees.jsonl``: one completed group a line, as plain JSON (schema: ``docs/trees.md``).

Invariants: a line needs nothing but itself to be read; it is strict JSON (no NaN); a line stays in the file, marked
``superseded`` where a resumed run went back behind it; one cut short by a crash is left out at the end of the file and
an error that names it anywhere else.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypedDict

from asyncrl.config.tree import TreeConfig
from asyncrl.types import Group, Node, TurnSample

SCHEMA = 2

NodeRecord = dict[str, Any]


class GroupRecord(TypedDict):
    schema: int
    key: int
    env: str
    task: str
    seed: int
    goals: list[str]
    """Distinct goals over the turns: one, since a group plays one task."""
    roots: int
    branch: int
    leaf_budget: int
    version: int | None
    """Version and update the group was trained at; None in a record that was not."""
    update: int | None
    seconds: float
    counters: dict[str, int]
    nodes: list[NodeRecord]
    leaves: list[dict[str, Any]]


class RecordError(ValueError):
    """A line that is not a group record of a known schema."""


def record_of(group: Group, tree: TreeConfig, samples: Sequence[TurnSample] = ()) -> GroupRecord:
    """The record of ``group``; nodes without a turn sample get no credit (advantages 0, no copies)."""
    credit = {sample.node: (sample.advantage_pos, sample.advantage_neg, sample.copies) for sample in samples}
    return GroupRecord(
        schema=SCHEMA,
        key=group.key,
        env=group.task.env,
        task=group.task.id,
        seed=group.task.seed,
        goals=sorted({node.turn.observation.goal for node in group.nodes}),
        roots=tree.roots,
        branch=tree.branch,
        leaf_budget=tree.leaves,
        version=None,
        update=None,
        seconds=round(group.seconds, 3),
        counters=dict(group.counters),
        nodes=[_node(node, *credit.get(node.id, (0.0, 0.0, 0))) for node in group.nodes],
        leaves=[asdict(leaf) for leaf in group.leaves],
    )


def to_line(record: GroupRecord, version: int | None = None, update: int | None = None) -> str:
    """One line of JSON without its newline, with the version and update the group was trained at.

    Raises ValueError: a number is not finite.
    """
    trained = {**record, "version": version, "update": update}
    return json.dumps(trained, allow_nan=False, separators=(",", ":"))


def from_line(line: str) -> GroupRecord:
    """The inverse of :func:`to_line`.

    Raises RecordError: not JSON, not an object, an unknown schema, or a field is missing.
    """
    try:
        record: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise RecordError(f"not a line of JSON: {error}") from error
    found = record.get("schema") if isinstance(record, dict) else type(record).__name__
    if found not in (1, SCHEMA):  # 1 has all but a node's ``void`` and ``signals``
        raise RecordError(f"expected a group record of schema {SCHEMA}, got {found!r}")
    if missing := GroupRecord.__required_keys__ - record.keys():
        raise RecordError(f"group record lacks {', '.join(sorted(missing))}")
    return record


def read(path: str | Path) -> Iterator[GroupRecord]:
    """The records of a file that count, oldest first: neither superseded nor, at the end, cut short by a crash.

    Raises RecordError: a line is not a record; the message names the file and the line.
    """
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                return
            try:
                record = from_line(line)
            except RecordError as error:
                raise RecordError(f"{path}, line {number}: {error}") from error
            if "superseded" not in record:
                yield record


def _node(node: Node, advantage_pos: float, advantage_neg: float, copies: int) -> NodeRecord:
    turn = node.turn
    return {
        "id": node.id,
        "parent": node.parent,
        "tree": node.tree,
        "depth": node.depth,
        "observation": turn.observation.text,
        "response": turn.text,
        **asdict(turn.parsed),
        "reward": turn.reward,
        "terminated": turn.terminated,
        "truncated": turn.truncated,
        "spans": [[span.version, span.start, span.end] for span in turn.generation.spans],
        "prompt_tokens": len(turn.prompt_ids),
        "tokens": len(turn.generation.token_ids),
        "finish": turn.generation.finish,
        "seconds": round(turn.generation.seconds, 4),
        "signals": (signals := turn.generation.signals) and signals._asdict(),
        "advantage_pos": advantage_pos,
        "advantage_neg": advantage_neg,
        "copies": copies,
    }
