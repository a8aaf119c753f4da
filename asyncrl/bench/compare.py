"""Configurations side by side over seeds: a table, and their curves against generated tokens."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from asyncrl.bench.runs import markdown, train_once
from asyncrl.config.load import ConfigError
from asyncrl.view.curve import Curve, draw, read_curve


@dataclass(frozen=True, slots=True)
class Run:
    seed: str
    summary: Mapping[str, Any]
    curve: Curve


@dataclass(frozen=True, slots=True)
class Variant:
    """What is set beside others: a configuration, and the values it has for the keys that vary."""

    config: Path
    values: Sequence[str]
    """As overrides, ``key=value``."""

    @property
    def label(self) -> str:
        return " ".join([self.config.stem, *self.values])

    @property
    def name(self) -> str:
        """The label as a folder may have it."""
        return re.sub(r"[^\w.-]+", "-", self.label)


def variants(configs: Sequence[Path], vary: Sequence[str]) -> list[Variant]:
    """Every configuration with every combination of the values in ``vary``, each ``key=value,value,...``."""
    keys = [varied.partition("=") for varied in vary]
    if bad := [varied for varied, (key, _, values) in zip(vary, keys, strict=True) if not (key and values)]:
        raise ConfigError(f"--vary {bad[0]}: give a key and its values, e.g. tree.leaves=4,8,16")
    grid = [[f"{key}={value}" for value in values.split(",")] for key, _, values in keys]
    found = [Variant(config, values) for config in configs for values in product(*grid)]
    for name, times in Counter(variant.name for variant in found).items():
        if times > 1:
            raise ConfigError(f"{times} runs would have the name {name}; name each file and each value once")
    return found


def compare(chosen: Sequence[Variant], seeds: Sequence[str], out: Path, overrides: Sequence[str] = ()) -> str:
    """Run every variant with every ``runtime.seed`` into ``out``, with ``overrides`` (``key=value``) for all.

    Returns a Markdown table, also written to ``out/table.md`` beside ``curves.png``.

    Raises RuntimeError: a run failed; its log lies in ``out``.
    """
    runs: dict[str, list[Run]] = {}
    for variant in chosen:
        runs[variant.label] = []
        for seed in seeds:
            name = f"{variant.name}-{seed}"
            summary = train_once(variant.config, out, name, [f"runtime.seed={seed}", *overrides, *variant.values])
            runs[variant.label].append(Run(seed, summary, read_curve(out / name / "metrics.jsonl")))
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

    def price(those: Sequence[Run]) -> str:
        each = [run.summary["tokens_per_success"] for run in those]
        return "" if None in each else f"{mean(each):.0f}"

    rows = []
    for label, those in runs.items():
        for run in those:
            tokens, seconds = run.summary["tokens_generated"] / 1e3, run.summary["seconds"]["total"]
            rows.append([label, run.seed, *success([run]), f"{tokens:.0f}k", price([run]), f"{seconds:.0f}"])
        rows.append([f"**{label}**", "mean", *success(those), "", price(those), ""])
    header = f"run | seed | cold start | final | gain | at {budget / 1e3:.0f}k tokens | tokens | per success | seconds"
    return markdown(header, rows)
