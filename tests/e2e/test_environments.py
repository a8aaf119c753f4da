"""Short asynchronous runs on every environment by both methods: SPARK's trees, and chains under T2PO's control.

That everything works together, not that it learns. `pytest -m slow tests/e2e/test_environments.py -k webshop-t2po` runs
one; environments whose data is not on this machine are skipped and say so.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncrl.config.load import merge
from asyncrl.env import find_env
from asyncrl.tree.records import read
from tests.e2e.conftest import finish
from tests.recount import recount

Section = dict[str, Any]

SMALL: Section = {
    "model": {
        "tiny": {
            "tasks": 8, "layers": 2, "hidden": 128, "heads": 4, "kv_heads": 4,
            "intermediate": 256, "vocab": 1024, "max_length": 2048,
        },
    },
    "env": {"workers": 1, "slots_per_worker": 16, "max_turns": 5},
    "prompt": {"style": "compact", "history": 1, "max_prompt_tokens": 1984},
    "sampling": {"max_tokens": 64},
    "engine": {"max_num_seqs": 16, "max_model_len": 2048, "kv_cache_gib": 0.5},
    "learner": {"lr": 1.0e-4, "tokens_per_micro_batch": 8192},
    "runtime": {"versions": 3, "groups_per_batch": 2, "max_lag": 1, "coordinators": 1, "checkpoint_every": 3},
    "sft": {"trajectories": 16, "epochs": 4, "batch_rows": 8, "lr": 3.0e-3},
    "eval": {"tasks": 2},
}  # fmt: skip
"""What every run here shares; a run's parts are merged over it as files that extend one another are."""

SPARK: Section = {
    "prompt": {"method": "spark"},
    "tree": {"roots": 2, "branch": 2, "leaves": 4, "criterion": "explore"},
    "algo": {"advantage": "spark"},
}
T2PO: Section = {
    "prompt": {"method": "react"},
    "tree": {"roots": 4, "branch": 1, "leaves": 4, "criterion": "none"},
    "algo": {"advantage": "gigpo"},
    "thinking": {"min_tokens": 4, "window": 2, "eps": 0.1, "cap": 48, "tds": True},
    "sft": {"hesitation": 0.6},
}
METHODS = {"spark": SPARK, "t2po": T2PO}

ENVIRONMENTS: dict[str, Section] = {
    "pantry": {},
    "scienceworld": {
        "env": {"slots_per_worker": 4},  # each a JVM
        "sft": {"trajectories": 6, "demonstrator": {"max_turns": 60}},
        "model": {"tiny": {"tasks": 4}},
    },
    "alfworld": {"prompt": {"history": 0}, "sft": {"trajectories": 16}},
    "webshop": {"prompt": {"history": 0}, "sft": {"trajectories": 10, "batch_rows": 4}},
    "searchqa": {
        "env": {"train_split": "small_train", "test_split": "small_test", "max_turns": 4},
        "sft": {"trajectories": 50},
    },
    "sokoban": {"sft": {"trajectories": 30}},
    "ezpoints": {"sft": {"trajectories": 60}},
}
OWN: dict[tuple[str, str], Section] = {
    ("searchqa", "t2po"): {"thinking": {"tail": "\n"}, "algo": {"anchor_similarity": 0.9}},
}


def configure(name: str, method: str) -> Section:
    """The configuration of one run."""
    whole = {"env": {"name": name}, "track": {"name": f"{name}_{method}"}}
    for part in (SMALL, METHODS[method], ENVIRONMENTS[name], OWN.get((name, method), {})):
        whole = merge(whole, part)
    return whole


def _skip_without_data(environment: Section) -> None:
    try:
        spec = find_env(environment["name"])
        spec.env_class().preflight()
        spec.make().check_splits(environment.get("train_split", "train"), environment.get("test_split", "test"))
    except (ValueError, ImportError) as missing:
        pytest.skip(str(missing))


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_a_short_run(name: str, method: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    config = configure(name, method)
    _skip_without_data(config["env"])
    folder = tmp_path_factory.mktemp(f"{name}_{method}")
    given = folder / "config.yaml"
    given.write_text(yaml.safe_dump(config))
    run = finish(["train", str(given)], folder, timeout_s=900)
    counted = recount(read(run.folder / "trees.jsonl"))
    assert counted.problems == [] and counted.groups == run.summary["groups"] >= 4
    assert run.summary["updates"] >= 2
    assert run.summary["lag_max"] <= 1
    assert run.summary["replay_mismatches"] == 0 and run.summary["digest_mismatches"] == 0
    assert counted.children == run.summary["branches_verified"]
    if method == "spark":
        assert counted.leaves_max <= 4 and run.summary["turns_cut"] == 0
    else:
        assert counted.children == 0
        _thinking_was_measured(run.folder)


def _thinking_was_measured(folder: Path) -> None:
    """In every version; whether some was cut depends on what so short a cold start has taught."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    shares = [line["thinking/cut_stable_share"] for line in lines if "thinking/cut_stable_share" in line]
    assert len(shares) == 3 and all(0 <= share <= 1 for share in shares)
