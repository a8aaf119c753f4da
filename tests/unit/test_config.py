"""Composition, overrides and the messages a bad configuration gets."""

from pathlib import Path

import pytest
import yaml

from asyncrl.config.load import ConfigError, dump, load, merge, validate

BASE = "env: {name: pantry}\n"


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def problem(tmp_path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, "bad.yaml", text), overrides)
    return str(caught.value)


def test_bases_merge_in_order_then_the_file_then_overrides(tmp_path: Path) -> None:
    write(tmp_path, "parts/a.yaml", "env: {name: pantry, workers: 2}\ntree: {roots: 2, leaves: 4}\n")
    write(tmp_path, "parts/b.yaml", "tree: {leaves: 6}\nlearner: {lr: 1e-5}\n")
    top = write(tmp_path, "top.yaml", "extends: [parts/a.yaml, parts/b.yaml]\ntree: {branch: 3}\n")
    config = load(top, ["tree.leaves=7", "env.options.size=3"])
    assert (config.tree.roots, config.tree.branch, config.tree.leaves) == (2, 3, 7)
    assert config.env.workers == 2
    assert config.env.options == {"size": 3}
    assert config.learner.lr == 1e-5


def test_extends_is_relative_to_the_file_it_stands_in(tmp_path: Path) -> None:
    write(tmp_path, "env/pantry.yaml", BASE)
    write(tmp_path, "recipes/base.yaml", "extends: ../env/pantry.yaml\n")
    assert load(write(tmp_path, "top.yaml", "extends: recipes/base.yaml\n")).env.name == "pantry"


def test_a_file_two_others_share_is_not_a_cycle(tmp_path: Path) -> None:
    write(tmp_path, "root.yaml", BASE)
    write(tmp_path, "a.yaml", "extends: root.yaml\n")
    write(tmp_path, "b.yaml", "extends: root.yaml\n")
    assert load(write(tmp_path, "top.yaml", "extends: [a.yaml, b.yaml]\n")).env.name == "pantry"


def test_a_cycle_is_refused_with_its_chain(tmp_path: Path) -> None:
    write(tmp_path, "b.yaml", "extends: a.yaml\n")
    path = write(tmp_path, "a.yaml", "extends: b.yaml\n")
    with pytest.raises(ConfigError, match=r"a\.yaml -> b\.yaml -> a\.yaml"):
        load(path)


def test_merge_replaces_lists_and_null_and_leaves_its_arguments_alone() -> None:
    base = {"a": {"x": 1, "y": [1, 2]}, "b": {"z": 1}}
    assert merge(base, {"a": {"y": [3]}, "b": None}) == {"a": {"x": 1, "y": [3]}, "b": None}
    assert base == {"a": {"x": 1, "y": [1, 2]}, "b": {"z": 1}}


def test_null_override_removes_an_optional_section(tmp_path: Path) -> None:
    path = write(tmp_path, "c.yaml", BASE + "sft: {epochs: 2}\n")
    assert load(path).sft is not None
    assert load(path, ["sft=null"]).sft is None
    resurrected = load(path, ["sft=null", "sft.epochs=1"]).sft
    assert resurrected is not None
    assert resurrected.epochs == 1


def test_dump_round_trips(tmp_path: Path) -> None:
    path = write(tmp_path, "c.yaml", BASE + "learner: {lr: 3.0e-6}\nsft: {}\n")
    config = load(path)
    assert validate(yaml.safe_load(dump(config))) == config


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("tree.leafs=8", ["tree.leafs", "unknown key", "did you mean 'leaves'"]),
        ("treee.roots=8", ["treee", "unknown key", "did you mean 'tree'"]),
        ("tree.leaves=2", ["tree", "N = 2", "M = 4"]),
        ("tree.branch=0", ["tree.branch", "greater than or equal to 1", "got 0"]),
        ("sampling.temperature=0", ["sampling.temperature", "must be greater than 0", "got 0"]),
        ("algo.advantage=grpo", ["algo.advantage=grpo", "tree.criterion=explore", "tree.criterion=none"]),
        ("model.tiny={hidden: 128, heads: 3}", ["model.tiny", "hidden (128)", "multiple of heads (3)"]),
        ("model.tiny={hidden: 128, heads: 4, kv_heads: 3}", ["model.tiny", "heads of kv_heads (3)"]),
        ("model.tiny={hidden: 96, heads: 4}", ["model.tiny", "96 / 4 = 24", "32, 64, 80"]),
        ("engine.gpus=0.5", ["engine.gpus=0.5 and learner.gpus=0", "both below 1 and together at most 1"]),
        ("learner.gpus=0.5", ["engine.gpus=0 and learner.gpus=0.5", "both below 1 and together at most 1"]),
        ("track.wandb=onlin", ["track.wandb", "'online'", "got 'onlin'", "did you mean 'online'?"]),
        ("tree=3", ["tree", "expected a section", "roots", "got 3"]),
        ("tree.roots=many", ["tree.roots", "must be a valid integer", "got 'many'"]),
        ("track.name=a/b", ["track.name", "must match", "got 'a/b'"]),
        ("learner.zero_stage=4", ["learner.zero_stage", "must be 0, 1, 2 or 3", "got 4"]),
        ("sft.epoch=1", ["sft.epoch", "did you mean 'epochs'"]),
        ("env.name=null", ["env.name", "valid string", "got None"]),
        ("tree.roots", ["'tree.roots'", "expected key.path=value"]),
        ("=3", ["expected key.path=value"]),
        ("env.name.x=1", ["env.name is a value, not a section"]),
        ("thinking={window: 0}", ["thinking.window", "greater than or equal to 1", "got 0"]),
        ("thinking={eps: -1}", ["thinking.eps", "must be greater than 0", "got -1"]),
        ("thinking={eta: 0.5}", ["thinking", "eta: of no effect without tds", "set tds=true"]),
        ("thinking={top_j: 1}", ["thinking", "top_j=1", "confidence=top1"]),
        ("thinking={cap: 5000}", ["thinking.cap=5000", "below sampling.max_tokens="]),
        ("tree.roots=[1", ["override 'tree.roots=[1'", "not valid YAML"]),
    ],
)
def test_a_bad_value_names_path_given_and_allowed(tmp_path: Path, override: str, parts: list[str]) -> None:
    message = problem(tmp_path, BASE, override)
    assert [part for part in parts if part not in message] == [], message


def test_grpo_on_chains_and_one_shared_gpu_are_fine(tmp_path: Path) -> None:
    path = write(tmp_path, "c.yaml", BASE)
    assert load(path, ["algo.advantage=grpo", "tree.criterion=none"]).algo.advantage == "grpo"
    assert load(path, ["engine.gpus=0.3", "engine.generators=2", "learner.gpus=0.4"]).engine.gpus == 0.3
    assert load(path, ["engine.gpus=1", "engine.generators=2", "learner.gpus=1"]).engine.gpus == 1


@pytest.mark.parametrize("gpus", [("0.5", "1"), ("0.6", "0.5"), ("2", "2"), ("0", "1")])
def test_gpus_that_no_transport_joins_are_refused(tmp_path: Path, gpus: tuple[str, str]) -> None:
    message = problem(tmp_path, BASE, f"engine.gpus={gpus[0]}", f"learner.gpus={gpus[1]}")
    assert f"engine.gpus={gpus[0]} and learner.gpus={gpus[1]}" in message
    assert "a GPU for each actor" in message


def test_two_learner_ranks_cannot_share_a_gpu(tmp_path: Path) -> None:
    message = problem(tmp_path, BASE, "engine.gpus=0.3", "learner.gpus=0.3", "learner.world_size=2")
    assert "one GPU, shared by generators and one learner rank" in message


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, "c.yaml", "tree: {branch: 0, root: 1}\n"))
    assert len(caught.value.problems) == 3
    assert any("env: required" in line for line in caught.value.problems)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("tree: {roots: 1\n", ["bad.yaml", "line", "not valid YAML"]),
        ("tree:\n  roots: 1\n  roots: 2\n", ["line 3", "'roots' is given twice"]),
        ("- a\n- b\n", ["expected sections"]),
        ("extends: 3\n", ["extends must be a file name"]),
        ("extends: absent.yaml\n", ["absent.yaml", "named by extends in", "No such file"]),
        ("a: !!python/object/apply:os.getcwd []\n", ["not valid YAML"]),
    ],
)
def test_a_bad_file_is_answered(tmp_path: Path, text: str, parts: list[str]) -> None:
    message = problem(tmp_path, text)
    assert [part for part in parts if part not in message] == [], message


def test_a_missing_file_is_answered(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration file"):
        load(tmp_path / "none.yaml")
