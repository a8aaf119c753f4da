"""What T2PO's cut saved: tokens for each success, cut turns and thinking of runs, from their ``trees.jsonl``.

    python scripts/thinking_saved.py runs/cut runs/uncut --batches 25

Counts the first ``--batches`` training batches of each run, discarded tokens included.
"""

import argparse
from itertools import takewhile
from pathlib import Path
from statistics import mean

from asyncrl.tree.records import GroupRecord, read

EDGE = 5
"""Batches at either end whose thinking is told apart."""


def version(record: GroupRecord) -> int:
    """At which the group was trained."""
    assert record["version"] is not None
    return record["version"]


def thinking(records: list[GroupRecord]) -> float:
    """Mean tokens of thinking of a turn."""
    return mean(node["signals"]["thinking_tokens"] for record in records for node in record["nodes"] if node["signals"])


def row(run: Path, batches: int) -> str:
    records = list(takewhile(lambda record: version(record) < batches, read(run / "trees.jsonl")))
    assert max(map(version, records)) == batches - 1, f"{run} has fewer than {batches} batches"
    nodes = [node for record in records for node in record["nodes"]]
    leaves = [leaf for record in records for leaf in record["leaves"]]
    tokens = sum(node["tokens"] for node in nodes)
    tokens += sum(record["counters"].get("tokens_discarded", 0) for record in records)
    successes = sum(leaf["success"] for leaf in leaves)
    cut = mean(bool(node["signals"] and node["signals"]["rule"]) for node in nodes)
    first = thinking([record for record in records if version(record) < EDGE])
    last = thinking([record for record in records if version(record) >= batches - EDGE])
    return (
        f"{run.name}: {tokens / successes:.0f} tokens a success, {successes} of {len(leaves)} episodes succeeded, "
        f"{cut:.1%} of turns cut, "
        f"thinking {first:.1f} tokens a turn in the first {EDGE} batches, {last:.1f} in the last"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--batches", type=int, default=25)
    given = parser.parse_args()
    for run in given.runs:
        print(row(run, given.batches))


if __name__ == "__main__":
    main()
