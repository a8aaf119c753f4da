"""Configurations side by side over seeds: a table, and their curves against generated tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from asyncrl.bench.runs import markdown, train_once
from asyncrl.view.curve import Curve, draw, read_curve


@dataclass(frozen=True, slots=True)
class Run:
    seed: str
    summary: Mapping[str, Any]
    curve: Curve


def compare(configs: Sequence[Path], seeds: Sequence[str], out: Path, overrides: Sequence[str] = ()) -> str:
    """Run every configuration with every ``runtime.seed`` into ``out``, with ``overrides`` (``key=value``) for all.

    Returns a Markdown table, also written to ``out/table.md`` beside ``curves.png``.

    Raises RuntimeError: a run failed; its log lies in ``out``.
    """
    runs: dict[str, list[Run]] = {}
    for config in configs:
        runs[config.stem] = []
        for seed in seeds:
            name = f"{config.stem}-{seed}"
            summary = train_once(config, out, name, [f"runtime.seed={seed}", *overrides])
            runs[config.stem].append(Run(seed, summary, read_curve(out / name / "metrics.jsonl")))
    curves = {label: [run.curve for run in those] for label, those in runs.items()}
    draw(curves, out / "curves.png", f"success against generated tokens, {len(seeds)} seeds each")
    text = table(runs)
    (out / "table.md").write_text(text, encoding="utf-8")
    return text


def table(runs: Mapping[str, Sequence[Run]]) -> str:
    """A row a run and a mean a label.

    The column at equal tokens is held-out success, interpolated, at the smallest token budget of all runs.
    """
    budget = min(float(run.curve.tokens[-1]) for those in runs.values() for run in those)

    def success(those: Sequence[Run]) -> list[str]:
        before = mean(run.summary["success_coldstart"] for run in those)
        after = mean(run.summary["success_final"] for run in those)
        equal = mean(float(np.interp(budget, run.curve.eval_tokens, run.curve.eval_success)) for run in those)
        return [f"{before:.1%}", f"{after:.1%}", f"{100 * (after - before):+.1f}", f"{equal:.1%}"]

    rows = []
    for label, those in runs.items():
        for run in those:
            tokens, seconds = run.summary["tokens_generated"] / 1e3, run.summary["seconds"]["total"]
            rows.append([label, run.seed, *success([run]), f"{tokens:.0f}k", f"{seconds:.0f}"])
        rows.append([f"**{label}**", "mean", *success(those), "", ""])
    header = f"run | seed | cold start | final | gain | at {budget / 1e3:.0f}k tokens | tokens | seconds"
    return markdown(header, rows)
