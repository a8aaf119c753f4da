"""Single phases of a run, each on its own: evaluate a model, do the cold start, make a tiny model.

Invariant: what is asked for is refused before anything starts, or done to the end; an output folder is never mixed with
what lay there before.
"""

from __future__ import annotations

import asyncio
import json
import signal
import tempfile
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from asyncrl.coldstart.run import cold_start
from asyncrl.config.load import ConfigError
from asyncrl.config.run import RunConfig
from asyncrl.evaluate.episodes import EvalReport
from asyncrl.model.load import check_model_folder
from asyncrl.ops.job import make_model
from asyncrl.runtime.system import cluster, system
from asyncrl.runtime.train import cancel_on, evaluate_split
from asyncrl.track.base import Tracker
from asyncrl.track.console import ConsoleSink
from asyncrl.track.jsonl import JsonlSink


def evaluate_model(config: RunConfig, model: Path | None) -> EvalReport:
    """Measure ``model`` (default: ``model.path``) on the test split and print the report.

    Raises:
        ConfigError: there is no model to evaluate.
    """
    path = str(model or config.model.path or "")
    if not path:
        raise ConfigError("model.path: null makes an untrained model; give --model FOLDER, a checkpoint or model.path")
    try:
        check_model_folder(path)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    report = asyncio.run(_evaluate(config, path))
    console = Console()
    if console.is_terminal:
        table = Table("measure", "value", title=path)
        for name, value in asdict(report).items():
            table.add_row(name, f"{value:.4g}")
        console.print(table)
    else:
        console.print(json.dumps({"model": path, **asdict(report)}), markup=False, highlight=False, soft_wrap=True)
    return report


async def _evaluate(config: RunConfig, path: str) -> EvalReport:
    cancel_on(signal.SIGTERM)
    async with cluster(config), system(config, path, learner=False) as parts:
        return await evaluate_split(config, parts)


def cold_start_model(config: RunConfig, out: Path) -> Path:
    """The cold start of ``config`` alone; the trained model goes to ``out``, its losses to ``out`` + ``.jsonl``.

    Raises:
        ConfigError: no ``sft`` section, or ``out`` holds something.
    """
    if config.sft is None:
        raise ConfigError("sft: the configuration has no cold start; add the section, e.g. sft={}")
    refuse_used_folder(out)
    return asyncio.run(_cold_start(config, out))


async def _cold_start(config: RunConfig, out: Path) -> Path:
    cancel_on(signal.SIGTERM)
    assert config.sft is not None
    out.parent.mkdir(parents=True, exist_ok=True)
    sinks = [JsonlSink(out.with_name(f"{out.name}.jsonl")), ConsoleSink(0)]
    with tempfile.TemporaryDirectory(prefix="asyncrl-") as scratch, Tracker(sinks) as tracker:
        model_path = config.model.path or str(make_model(config, Path(scratch) / "model"))
        async with cluster(config):
            await cold_start(config, config.sft, model_path, out.resolve(), tracker)
    return out


def init_model(config: RunConfig, out: Path) -> Path:
    """A tiny model with random weights for ``config.env``, in ``out``.

    Raises:
        ConfigError: ``out`` holds something.
    """
    refuse_used_folder(out)
    return make_model(config, out)


def refuse_used_folder(out: Path) -> None:
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"--out: {out} exists already; name a new folder")
