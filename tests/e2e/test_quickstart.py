"""A short quickstart on real parts: every promise that can be read off a run's folder."""

import json
from collections import Counter

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.ops.job import HEADLINE
from asyncrl.tree.records import read
from tests.e2e.conftest import Run, finish
from tests.recount import recount

KEYS = {
    "success_coldstart", "success_final", "success_expert", "updates", "groups", "turn_samples", "tokens_generated",
    "lag_mean", "lag_max", "leaves_max", "branched_turn_share", "replay_mismatches", "seconds",
}  # fmt: skip
SHORT = ["sft.trajectories=150", "eval.tasks=40", "runtime.versions=4", "runtime.groups_per_batch=4"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return finish(["quickstart", *SHORT, "runtime.eval_every=0"], tmp_path_factory.mktemp("quickstart"), timeout_s=600)


@pytest.mark.timeout(660)
def test_the_summary_says_what_happened(run: Run) -> None:
    assert set(run.summary) >= KEYS
    assert run.summary["versions"] == 4
    assert run.summary["updates"] == 8  # two optimizer steps a batch
    assert run.summary["groups"] == 16
    assert run.summary["lag_max"] <= 1
    assert run.summary["replay_mismatches"] == 0
    assert run.summary["valid_turns_coldstart"] > 0.8
    assert (run.folder / "curve.png").stat().st_size > 10_000


def test_an_independent_recount_of_the_trees_agrees(run: Run) -> None:
    counted = recount(read(run.folder / "trees.jsonl"))
    assert counted.problems == []
    assert counted.groups == run.summary["groups"]
    assert counted.turns == run.summary["turn_samples"]
    assert counted.tokens == run.summary["tokens_generated"]
    assert counted.leaves_max == run.summary["leaves_max"] <= 8
    assert counted.branched_turn_share == pytest.approx(run.summary["branched_turn_share"])
    assert counted.children > 0


def test_the_terminal_shows_metrics_that_exist(run: Run) -> None:
    recorded = {name for line in (run.folder / "metrics.jsonl").read_text().splitlines() for name in json.loads(line)}
    assert [name for name in HEADLINE if name not in recorded] == []


def test_every_admitted_group_is_trained_once_and_plays_one_task(run: Run) -> None:
    keys = Counter(record["key"] for record in read(run.folder / "trees.jsonl"))
    assert sorted(keys) == list(range(16))
    assert set(keys.values()) == {1}


def test_trained_ids_are_the_sampled_ids(run: Run) -> None:
    assert run.summary["digests_checked"] == run.summary["turn_samples"]
    assert run.summary["digest_mismatches"] == 0


def test_engine_and_learner_agree_after_every_publish(run: Run) -> None:
    records = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    gaps = [record["publish/logprob_gap"] for record in records if "publish/logprob_gap" in record]
    assert len(gaps) == 4
    assert max(gaps) < 1e-3


def test_the_last_checkpoint_loads_elsewhere(run: Run) -> None:
    folder = run.folder / "checkpoints" / "version-000004"
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert model.config.vocab_size >= len(tokenizer)
