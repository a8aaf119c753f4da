"""Single phases of a run, each on its own: evaluate a model, do the cold start.

Invariant: callers have run the preflight; Ctrl-C and SIGTERM end everything that was started.
"""

import json
import tempfile
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from asyncrl.coldstart.sft import cold_start
from asyncrl.config.coldstart import SftConfig
from asyncrl.config.run import RunConfig
from asyncrl.ops.job import base_model
from asyncrl.runtime.system import cluster, system
from asyncrl.runtime.train import evaluate_split
from asyncrl.track.base import Sink, Tracker
from asyncrl.track.console import ConsoleSink
from asyncrl.track.jsonl import JsonlSink


async def evaluate_model(config: RunConfig, path: str) -> None:
    """Measure the model of ``path`` on the test split and print the report: a table, or one JSON line in a pipe."""
    async with cluster(config), system(config, path, learner=False) as parts:
        report = await evaluate_split(config, parts)
    console = Console()
    if console.is_terminal:
        table = Table("measure", "value", title=path)
        for name, value in asdict(report).items():
            table.add_row(name, f"{value:.4g}")
        console.print(table)
    else:
        console.print(json.dumps({"model": path, **asdict(report)}), markup=False, highlight=False, soft_wrap=True)


async def cold_start_model(config: RunConfig, sft: SftConfig, out: Path) -> None:
    """The cold start alone; the trained model goes to the new folder ``out``, its losses beside it to ``out.jsonl``."""
    out.parent.mkdir(parents=True, exist_ok=True)
    sinks: list[Sink] = [JsonlSink(out.with_name(f"{out.name}.jsonl")), ConsoleSink(0)]
    with tempfile.TemporaryDirectory(prefix="asyncrl-") as scratch, Tracker(sinks) as tracker:
        model_path = base_model(config, Path(scratch) / "model")
        async with cluster(config):
            await cold_start(config, sft, model_path, out.resolve(), tracker)
