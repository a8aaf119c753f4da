"""Configurations side by side over seeds: one run each, a table, and both curves against generated tokens.

Invariants: every run is a process of its own, one after another, so none has more of the machine than another; a run
whose summary is already in the folder is taken as it is, so an interrupted comparison goes on where it stopped.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from asyncrl.view.curve import draw, read_curve


@dataclass(frozen=True, slots=True)
class Row:
    label: str
    seed: int
    folder: Path
    summary: dict[str, Any]
    success_at_budget: float
    """Held-out success at the smallest token budget of all runs, interpolated between the evaluations around it."""


def compare(configs: Sequence[Path], seeds: Sequence[int], out: Path, overrides: Sequence[str] = ()) -> list[Row]:
    """Run every configuration with every seed into ``out``; writes ``curves.png`` and ``table.md`` there.

    Args:
        overrides: ``key=value``, applied to every run.

    Raises:
        RuntimeError: a run failed; its log lies in ``out``.
    """
    folders = {(config.stem, seed): _run(config, seed, out, overrides) for config in configs for seed in seeds}
    curves = {key: read_curve(folder / "metrics.jsonl") for key, folder in folders.items()}
    budget = min(float(curve.tokens[-1]) for curve in curves.values())
    rows = []
    for (label, seed), folder in folders.items():
        curve = curves[label, seed]
        at_budget = float(np.interp(budget, curve.eval_tokens, curve.eval_success))
        summary = json.loads((folder / "summary.json").read_text())
        rows.append(Row(label, seed, folder, summary, at_budget))
    draw(
        {label: [row.folder / "metrics.jsonl" for row in rows if row.label == label] for label in _labels(rows)},
        out / "curves.png",
        f"success against generated tokens, {len(seeds)} seeds each",
    )
    (out / "table.md").write_text(table(rows, budget), encoding="utf-8")
    return rows


def table(rows: Sequence[Row], budget: float) -> str:
    """A Markdown table, a row a run and a mean a label."""
    lines = [
        f"| run | seed | cold start | final | gain | at {budget / 1e3:.0f}k tokens | tokens | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for label in _labels(rows):
        those = [row for row in rows if row.label == label]
        for row in those:
            before, after = row.summary["success_coldstart"], row.summary["success_final"]
            lines.append(
                f"| {label} | {row.seed} | {before:.1%} | {after:.1%} | {100 * (after - before):+.1f} | "
                f"{row.success_at_budget:.1%} | {row.summary['tokens_generated'] / 1e3:.0f}k | "
                f"{row.summary['seconds']['total']:.0f} |"
            )
        before = mean(row.summary["success_coldstart"] for row in those)
        after = mean(row.summary["success_final"] for row in those)
        lines.append(
            f"| **{label}** | mean | {before:.1%} | {after:.1%} | {100 * (after - before):+.1f} | "
            f"{mean(row.success_at_budget for row in those):.1%} | | |"
        )
    return "\n".join(lines) + "\n"


def _labels(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row.label for row in rows))


def _run(config: Path, seed: int, out: Path, overrides: Sequence[str]) -> Path:
    name = f"{config.stem}-{seed}"
    folder = out / name
    if not (folder / "summary.json").exists():
        out.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was stopped: a new one would get another name
        command = [sys.executable, "-m", "asyncrl.cli", "train", str(config)]
        command += [f"runtime.seed={seed}", f"sft.seed={seed}", f"track.dir={out}", f"track.name={name}", *overrides]
        with (out / f"{name}.log").open("w") as log:
            code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL).returncode
        if code:
            raise RuntimeError(f"{name} failed with exit code {code}: see {out / f'{name}.log'}")
    return folder
