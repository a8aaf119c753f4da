"""What asynchrony buys: the same work in every mode of the loop, with slow and with fast environments.

Invariants: all runs start from one cold start and have the same seed, number of groups and cap on episodes in flight;
they differ in ``runtime.mode`` and in the environment's latency alone. Rates and shares leave out the evaluations
before and after training.
"""

import json
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from asyncrl.bench.runs import command, markdown, train_once
from asyncrl.config.load import load

DEFAULTS = (
    "env.latency.sigma=1.2",
    "eval.tasks=50",  # what is not measured is kept short
    "runtime.eval_every=0",
    "runtime.checkpoint_every=1000000",
    "runtime.keep_checkpoints=1",
)
KEPT = ("groups", "turn_samples", "tokens_generated", "lag_mean", "lag_max", "success_coldstart", "success_final")
SHARES = ("trainer_wait", "generator_idle", "env_idle", "publish", "admission_blocked")
HEADER = "mode | latency, s | turn samples/s | to sync | " + " | ".join(SHARES) + " | lag mean | lag max | success"

Row = dict[str, Any]
"""One run: ``mode``, ``median_s``, ``seconds_train``, the keys of ``KEPT`` and those of the run's profile."""


def measure(
    config: Path, overrides: Sequence[str], out: Path, modes: Sequence[str], medians: Sequence[str], to: Path
) -> str:
    """Run every mode at every median latency (seconds) into ``out``.

    Returns a Markdown table; ``to`` gets all figures as JSON, with the command, the versions, the machine and the time.

    Raises RuntimeError: a run failed; its log lies in ``out``.
    """
    shared = [*DEFAULTS, *overrides]
    if load(config, overrides).sft is not None:
        cold = (out / "coldstart").resolve()
        if not cold.exists():
            command(out / "coldstart.log", "sft", str(config), "--out", str(cold), *overrides)
        shared += ["sft=null", f"model.path={json.dumps(str(cold))}"]
    rows: list[Row] = []
    for median, mode in product(medians, modes):
        name = f"{mode}-{median}"
        own = [f"env.latency.median_s={median}", f"runtime.mode={mode}"]
        summary = train_once(config, out, name, [*shared, *own])
        row = {"mode": mode, "median_s": float(median), "seconds_train": summary["seconds"]["train"]}
        rows.append(row | {key: summary[key] for key in KEPT} | summary["profile"])
    provenance = json.loads((out / name / "run.json").read_text(encoding="utf-8"))
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text(json.dumps(provenance | {"command": sys.argv, "runs": rows}, indent=2) + "\n", encoding="utf-8")
    return table(rows)


def table(rows: Sequence[Row]) -> str:
    """A row a run; ``to sync`` is the ratio to the synchronous run at the same latency, where there is one."""
    sync = {row["median_s"]: row["turn_samples_per_s"] for row in rows if row["mode"] == "sync"}
    lines = []
    for row in rows:
        rate, base = row["turn_samples_per_s"], sync.get(row["median_s"])
        shares = [f"{row[f'{name}_share']:.1%}" for name in SHARES]
        last = [f"{row['lag_mean']:.2f}", str(row["lag_max"]), f"{row['success_final']:.1%}"]
        ratio = f"{rate / base:.2f}" if base else ""
        lines.append([row["mode"], f"{row['median_s']:g}", f"{rate:.1f}", ratio, *shares, *last])
    return markdown(HEADER.replace("_", " "), lines)
