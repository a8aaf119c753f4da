import json
import re
from copy import deepcopy
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algo.samples import turn_samples
from asyncrl.config.algo import AlgoConfig
from asyncrl.config.tree import TreeConfig
from asyncrl.track.jsonl import mend, supersede
from asyncrl.tree.forest import Forest
from asyncrl.tree.records import RecordError, from_line, read, record_of, to_line
from tests.recount import recount
from tests.unit.growing import TASK, grow, make_forest, make_turn

CFG = TreeConfig(roots=2, branch=2, leaves=4)


def small_record():
    """Two roots; root 0 branches once: nodes 0 -> {1, 2} and node 3."""
    forest = make_forest()
    forest.extend(0, make_turn("start", "a", explores=True, reward=0.25))
    [child] = forest.serve([0])[0]
    for leaf, before in ((0, "start/a"), (child, "start/a"), (1, "start")):
        forest.extend(leaf, make_turn(before, "b", terminated=True, reward=float(leaf == 0)))
        forest.finish(leaf, success=leaf == 0)
    group = forest.group(1.23456)
    return record_of(group, CFG, turn_samples(group, AlgoConfig()))


def test_a_record_survives_its_line():
    record = small_record()
    line = to_line(record, version=4, update=9)
    assert "\n" not in line
    assert from_line(line) == {**record, "version": 4, "update": 9}


def test_a_record_says_what_happened():
    record = small_record()
    assert (record["key"], record["env"], record["task"], record["seed"]) == (11, "toy", "7", 3)
    assert (record["roots"], record["branch"], record["leaf_budget"]) == (2, 2, 4)
    assert (record["goals"], record["seconds"]) == (["the goal"], 1.235)
    first = record["nodes"][0]
    assert (first["tag"], first["action"], first["observation"]) == ("explore", "a", "start")
    assert (first["spans"], first["tokens"], first["prompt_tokens"]) == ([[0, 0, 1], [1, 1, 3]], 3, 2)
    assert first["copies"] == 2
    assert first["advantage_pos"] > 0 > first["advantage_neg"]
    leaf = {"id": 0, "tree": 0, "node": 1, "reward": 1.25, "success": True, "end": "terminated"}
    assert record["leaves"][0] == leaf


@given(st.integers(0, 2**32), st.floats(0, 0.5), st.floats(0, 0.2))
def test_recount_agrees_with_the_forest_and_finds_no_problem(seed, fail, lose):
    rng, groups = Random(seed), []
    for key in range(3):
        forest = Forest(TASK, key, CFG, rng)
        groups.append(grow(forest, rng, fail=fail, lose=lose).group())
    lines = [to_line(record_of(group, CFG)) for group in groups]
    count = recount(map(from_line, lines))
    assert count.problems == []
    nodes = [node for group in groups for node in group.nodes]
    assert (count.groups, count.turns, count.repeated_keys) == (3, len(nodes), 0)
    assert count.tokens == sum(len(node.turn.generation.token_ids) for node in nodes)
    assert count.leaves_max == max(len(group.leaves) for group in groups)
    assert count.successes == sum(leaf.success for group in groups for leaf in group.leaves)
    if not count.counters["discarded"] and not count.counters["lost"]:
        assert (count.branch_nodes, count.children) == (count.counters["branches"], count.counters["children"])


def test_recount_figures():
    count = recount([small_record(), small_record()])
    assert (count.groups, count.repeated_keys, count.turns, count.tokens) == (2, 1, 8, 24)
    assert (count.leaves, count.leaves_max, count.successes) == (6, 3, 2)
    assert (count.branch_nodes, count.children, count.exploring_turns, count.invalid_turns) == (2, 2, 2, 0)
    assert count.branched_turn_share == pytest.approx(1 / 4)
    assert count.counters["triggers"] == 2


def set_in(record, where, key, value):
    record[where][key[0]][key[1]] = value


@pytest.mark.parametrize(
    ("rule", "spoil"),
    [
        ("leaf_budget", lambda r: r.update(leaf_budget=2)),
        ("leaf_budget", lambda r: r.update(roots=5)),
        ("counters", lambda r: r["counters"].update(children=2)),
        ("counters", lambda r: r["counters"].update(branches=0)),
        ("branch_factor", lambda r: r.update(branch=1)),
        ("structure", lambda r: set_in(r, "nodes", (2, "parent"), 9)),
        ("structure", lambda r: set_in(r, "nodes", (2, "depth"), 2)),
        ("structure", lambda r: set_in(r, "nodes", (2, "tree"), 1)),
        ("structure", lambda r: set_in(r, "nodes", (3, "tree"), 0)),
        ("leaves", lambda r: set_in(r, "leaves", (1, "node"), 1)),
        ("leaves", lambda r: r["leaves"].pop()),
        ("ended_episode", lambda r: set_in(r, "nodes", (0, "truncated"), True)),
        ("one_task", lambda r: set_in(r, "nodes", (3, "observation"), "elsewhere")),
        ("one_task", lambda r: r.update(goals=["one", "another"])),
        ("same_start", lambda r: set_in(r, "nodes", (2, "observation"), "elsewhere")),
        ("spans", lambda r: set_in(r, "nodes", (2, "spans"), [[1, 0, 1], [0, 1, 3]])),
        ("spans", lambda r: set_in(r, "nodes", (2, "spans"), [[0, 0, 1], [0, 2, 3]])),
        ("spans", lambda r: set_in(r, "nodes", (2, "spans"), [[0, 0, 2]])),
        ("reward", lambda r: set_in(r, "leaves", (0, "reward"), 1.0)),
    ],
)
def test_recount_finds_a_broken_rule(rule, spoil):
    record = deepcopy(small_record())
    assert recount([record]).problems == []
    spoil(record)
    problems = recount([record]).problems
    assert rule in {problem.rule for problem in problems}
    assert {problem.group for problem in problems} == {11}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", "not a line of JSON"),
        ("[1]", "schema 2, got 'list'"),
        ('{"schema": 99}', "schema 2, got 99"),
        ('{"schema": 2}', "lacks branch, counters"),
    ],
)
def test_a_line_that_is_no_record_is_answered(tmp_path, line, message):
    with pytest.raises(RecordError, match=message):
        from_line(line)
    path = tmp_path / "trees.jsonl"
    path.write_text(to_line(small_record()) + "\n" + line + "\n")
    with pytest.raises(RecordError, match=r"trees\.jsonl, line 2: .*" + message):
        list(read(path))


def test_a_last_line_cut_short_is_left_out_and_mended(tmp_path):
    path = tmp_path / "trees.jsonl"
    whole = to_line(small_record()) + "\n"
    path.write_text(whole + whole[:50])
    assert len(list(read(path))) == 1
    mend(path)
    assert path.read_text() == whole
    mend(path)
    assert path.read_text() == whole
    mend(tmp_path / "absent.jsonl")
    assert not (tmp_path / "absent.jsonl").exists()


def test_a_resumed_run_trains_each_group_once(tmp_path):
    path = tmp_path / "trees.jsonl"
    before, lost, again = (
        to_line({**small_record(), "key": key}, version) + "\n" for key, version in ((11, 0), (12, 1), (12, 2))
    )
    path.write_text(before + lost)
    assert supersede(path, len(before)) == 1
    with path.open("a") as file:
        file.write(again)
    assert [(record["key"], record["version"]) for record in read(path)] == [(11, 0), (12, 2)]
    assert recount(read(path)).repeated_keys == 0
    assert recount(map(from_line, path.read_text().splitlines())).repeated_keys == 1


def test_a_record_holds_what_its_schema_says():
    text = (Path(__file__).parents[2] / "docs" / "trees.md").read_text()
    record = small_record()
    for title, entry in (("group", record), ("node", record["nodes"][0]), ("leaf", record["leaves"][0])):
        section = text.split(f"## A {title}\n")[1].split("\n## ")[0]
        rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
        fields = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
        assert fields - {"superseded"} == set(entry), title


def test_lines_are_strict_json_whatever_the_model_wrote():
    record = small_record()
    record["nodes"][0]["response"] = "line\nbreak \u2028 \ud800 \x00 \u00e9"
    line = to_line(record)
    assert line.isascii()
    assert json.loads(line)["nodes"][0]["response"] == record["nodes"][0]["response"]
    record["nodes"][0]["reward"] = float("nan")
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_line(record)
