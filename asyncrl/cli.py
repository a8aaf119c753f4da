"""The command line. Thin: every command is one call into a room, and rooms are imported only when called.

Exit codes: 0 done, 1 failed, 2 bad input (nothing was started), 130 interrupted (Typer sees to it), 143 terminated.
"""

import asyncio
import json
import logging
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich import get_console
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape

from asyncrl.config.load import ConfigError, dump, load, validate
from asyncrl.env import REGISTRY
from asyncrl.ops.preflight import preflight
from asyncrl.track.rundir import RunDir
from envs.names import read_name

app = typer.Typer(
    name="asyncrl",
    help="Train language-model agents on long tasks, asynchronously, on Ray.",
    epilog="Start with: asyncrl quickstart",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
)
model_app = typer.Typer(no_args_is_help=True, help="Make models.")
env_app = typer.Typer(no_args_is_help=True, help="List, check and play environments.")
bench_app = typer.Typer(no_args_is_help=True, help="Measure.")
data_app = typer.Typer(no_args_is_help=True, help="Data that environments need: what is there, fetching, checking.")
serve_app = typer.Typer(no_args_is_help=True, help="Services.")
app.add_typer(model_app, name="model")
app.add_typer(bench_app, name="bench")
app.add_typer(env_app, name="env")
app.add_typer(data_app, name="data")
app.add_typer(serve_app, name="serve")

QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.yaml"

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file, e.g. configs/quickstart.yaml")]
Overrides = Annotated[
    list[str],
    typer.Argument(metavar="[KEY=VALUE]...", help="e.g. tree.leaves=16", default_factory=list, show_default=False),
]
EnvName = Annotated[str, typer.Argument(metavar="NAME[,KEY=VALUE]...", help="A registered name, or module:Class")]


@app.callback()
def _options(debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and debug logs.")] = False) -> None:
    level = logging.DEBUG if debug else logging.INFO
    if sys.stdout.isatty():
        # The console that live progress is drawn on, so that log lines scroll above it.
        handler: logging.Handler = RichHandler(console=get_console(), show_path=False)
        logging.basicConfig(level=logging.WARNING, format="%(message)s", datefmt="%X", handlers=[handler])
    else:
        logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("asyncrl").setLevel(level)


@app.command()
def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG|RUN", help="YAML file, or with --resume a run's folder")],
    overrides: Overrides,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved configuration and stop.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run of this folder.")] = False,
) -> None:
    """Train a policy: model, cold start where configured, then reinforcement learning.

    Writes a run folder (track.dir/track.name): resolved config, metrics, trees, checkpoints, summary.json. A run that
    was stopped, or is to be longer, goes on from its newest checkpoint with --resume: no task is lost or trained twice.

    [dim]asyncrl train configs/scienceworld_spark_smoke.yaml runtime.versions=3 track.name=try
    asyncrl train --resume runs/try runtime.versions=6[/dim]
    """
    run = RunDir.open(config) if resume else None
    resolved = load(run.config if run else config, overrides)
    if dry_run:
        typer.echo(dump(resolved), nl=False)
        return
    preflight(resolved)
    from asyncrl.ops.job import run_job

    run, summary = run_job(resolved, resume=run)
    before, after = (100 * summary[f"success_{when}"] for when in ("coldstart", "final"))
    typer.echo(f"held-out success {before:.1f} % before, {after:.1f} % after {summary['versions']} versions")
    typer.echo(f"{summary['branches_verified']} branches verified, {summary['replay_mismatches']} replay mismatches")
    typer.echo(f"done: {run.summary}")


@app.command("eval")
def evaluate(
    what: Annotated[Path, typer.Argument(metavar="CONFIG|CHECKPOINT", help="YAML file, or a checkpoint of a run")],
    overrides: Overrides,
    model: Annotated[Path | None, typer.Option(help="Model folder; default: the checkpoint, or model.path")] = None,
) -> None:
    """Measure a policy on the held-out split.

    A checkpoint is evaluated under the configuration of the run it lies in.

    [dim]asyncrl eval runs/quickstart/checkpoints/version-000028 eval.tasks=100[/dim]
    """
    source, model = (_config_of(what), model or what) if what.is_dir() else (what, model)
    chosen = [] if model is None else [f"model.path={json.dumps(str(model))}"]
    resolved = load(source, [*overrides, *chosen])
    if resolved.model.path is None:
        raise ConfigError("model.path: null makes an untrained model; give --model FOLDER, a checkpoint or model.path")
    preflight(resolved)
    from asyncrl.ops.single import evaluate_model

    asyncio.run(evaluate_model(resolved, resolved.model.path))


@app.command()
def sft(
    config: Config,
    out: Annotated[Path, typer.Option(help="Where the trained model goes.")],
    overrides: Overrides,
) -> None:
    """Run the cold start alone: supervised training on annotated expert trajectories.

    [dim]asyncrl sft configs/quickstart.yaml --out models/cold sft.epochs=2[/dim]
    """
    resolved = load(config, overrides)
    if resolved.sft is None:
        raise ConfigError("sft: the configuration has no cold start; add the section, e.g. sft={}")
    preflight(resolved, out)
    from asyncrl.ops.single import cold_start_model

    asyncio.run(cold_start_model(resolved, resolved.sft, out))


@app.command()
def quickstart(overrides: Overrides) -> None:
    """Train a small agent on this machine's CPU, from nothing to runs/quickstart/summary.json.

    [dim]asyncrl quickstart runtime.seed=1[/dim]
    """
    config = load(QUICKSTART, overrides)
    preflight(config)
    from asyncrl.ops.quickstart import quickstart as run

    run(config)


@bench_app.command("compare")
def bench_compare(
    configs: Annotated[list[Path], typer.Argument(metavar="CONFIG...", help="YAML files to set side by side")],
    out: Annotated[Path, typer.Option(help="Folder for the runs, table.md and curves.png.")],
    seeds: Annotated[str, typer.Option(help="Comma separated.")] = "0,1,2",
    vary: Annotated[list[str] | None, typer.Option(metavar="KEY=A,B", help="Runs with each of these values.")] = None,
    override: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="Applied to every run.")] = None,
) -> None:
    """Run configurations over seeds, one after another, and tabulate and draw them against generated tokens.

    With --vary, a sweep: every configuration with each value; given several times, with every combination.

    [dim]asyncrl bench compare configs/quickstart.yaml configs/quickstart_grpo.yaml --out runs/compare
    --override runtime.eval_every=10
    asyncrl bench compare configs/quickstart_t2po.yaml --out runs/eps --vary thinking.eps=0.05,0.1,0.2[/dim]
    """
    from asyncrl.bench.compare import compare, variants

    numbers, those = seeds.split(","), variants(configs, vary or ())
    for variant in those:
        for seed in numbers:
            preflight(load(variant.config, [f"runtime.seed={seed}", *(override or ()), *variant.values]))
    typer.echo(compare(those, numbers, out, override or ()))


@bench_app.command("async")
def bench_async(
    config: Config,
    out: Annotated[Path, typer.Option(help="Folder for the runs.")],
    to: Annotated[Path, typer.Option("--json", help="File for all figures.")],
    overrides: Overrides,
    modes: Annotated[str, typer.Option(help="Comma separated.")] = "sync,one_step,async",
    latency: Annotated[str, typer.Option(help="Median seconds of an environment's step, comma separated.")] = "0.3,0",
) -> None:
    """Train on the same work in every mode and at every latency, one after another, and tabulate where time goes.

    [dim]asyncrl bench async configs/quickstart.yaml runtime.max_lag=4 --out runs/async --json runs/async.json[/dim]
    """
    chosen, medians = modes.split(","), latency.split(",")
    for own in [f"runtime.mode={mode}" for mode in chosen] + [f"env.latency.median_s={median}" for median in medians]:
        preflight(load(config, [*overrides, own]))
    from asyncrl.bench.asynchrony import measure

    typer.echo(measure(config, overrides, out, chosen, medians, to))


@bench_app.command("control")
def bench_control(
    model: Annotated[str, typer.Option(help="A model folder, or random weights in the shape 1.5b or tiny.")] = "tiny",
    in_flight: Annotated[int, typer.Option(help="Requests at once.", min=1)] = 64,
    tokens: Annotated[int, typer.Option(help="Of each response.", min=1)] = 128,
    rounds: Annotated[int, typer.Option(help="Timed rounds, after one that warms up.", min=1)] = 5,
    to: Annotated[Path | None, typer.Option("--json", help="File for all figures.")] = None,
) -> None:
    """Time the engine with T2PO's control of thinking, without it, and with the log-probs it would else be made of.

    [dim]asyncrl bench control --model 1.5b --in-flight 256 --tokens 256 --json runs/control.json[/dim]
    """
    from asyncrl.bench.control import run

    typer.echo(run(model, in_flight, tokens, rounds, to))


@model_app.command("init")
def model_init(
    out: Annotated[Path, typer.Option(help="Folder to make.")],
    overrides: Overrides,
    env: Annotated[str, typer.Option(help="Environment whose words the tokenizer learns.")] = "pantry",
) -> None:
    """Make a tiny model with random weights and a tokenizer of the environment's own words.

    [dim]asyncrl model init --env pantry --out models/tiny model.tiny.layers=2 runtime.seed=1[/dim]
    """
    resolved = validate({"env": {"name": env}}, overrides, source="asyncrl model init")
    preflight(resolved, out)
    from asyncrl.ops.job import make_model

    typer.echo(make_model(resolved, out))


@env_app.command("list")
def env_list() -> None:
    """Show the registered environments."""
    for name, target in sorted(REGISTRY.items()):
        typer.echo(f"{name:16} {target}")


@env_app.command("check")
def env_check(
    name: EnvName,
    split: Annotated[str, typer.Option(help="Split whose tasks are tried.")] = "train",
    tasks: Annotated[int, typer.Option(help="How many of them.", min=1)] = 3,
    seed: Annotated[int, typer.Option(help="Seed of the episodes played.")] = 0,
) -> None:
    """Verify that an environment keeps the protocol; exit code 1 where it does not.

    [dim]asyncrl env check mypackage.envs:Maze --tasks 5[/dim]
    """
    from envs.check import check

    with _bad_input():
        report = check(read_name(name), split, tasks, seed)
    for line in report.lines():
        typer.echo(line)
    if not report.passed:
        raise typer.Exit(1)


@env_app.command("play")
def env_play(
    name: EnvName,
    task: Annotated[str | None, typer.Option(help="Task id; default: the first training task.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the task.")] = 0,
) -> None:
    """Play an environment by hand, seeing what an agent sees.

    [dim]asyncrl env play sokoban,boxes=2 --seed 17[/dim]
    """
    from envs.play import play

    with _bad_input():
        play(read_name(name), task, seed=seed)


@data_app.command("list")
def data_list() -> None:
    """Show the data sets, where each is looked for, and what is missing."""
    from envs.datasets import datasets, missing

    for name, dataset in datasets().items():
        lacks = missing(dataset)
        state = f"lacks {', '.join(lacks)}; type: asyncrl data fetch {name}" if lacks else "there"
        typer.echo(f"{name:10} {dataset.folder}: {state}")


@data_app.command("fetch")
def data_fetch(
    name: Annotated[str, typer.Argument(help="A data set, as asyncrl data list names it")],
    source: Annotated[Path | None, typer.Option("--from", help="Local folder or archive to take it from.")] = None,
) -> None:
    """Bring a data set into the data folder, from its official source unless told otherwise, and check it.

    [dim]asyncrl data fetch searchqa --from downloads/searchqa.tar.xz[/dim]
    """
    from envs.datasets import check, fetch, find

    with _bad_input():
        dataset = find(name)
        typer.echo(f"fetched: {fetch(dataset, source)}")
        _tell(check(dataset, fetched=True))


@data_app.command("check")
def data_check(name: Annotated[str, typer.Argument(help="A data set, as asyncrl data list names it")]) -> None:
    """Read what is there: counts and checksums; exit code 1 where something is missing or damaged."""
    from envs.datasets import check, find

    with _bad_input():
        _tell(check(find(name)))


def _tell(found: Iterable[tuple[str, str]]) -> None:
    problems = 0
    for what, problem in found:
        typer.echo(f"FAIL {what}: {problem}" if problem else f"ok   {what}")
        problems += bool(problem)
    if problems:
        raise typer.Exit(1)


@serve_app.command("retriever")
def serve_retriever(
    index: Annotated[Path, typer.Argument(help="Index folder (python -m envs.searchqa.index) or a small corpus file")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65535)] = 8000,
    replicas: Annotated[int, typer.Option(help="Most that autoscaling may start.", min=1)] = 4,
    gpus: Annotated[float, typer.Option(help="GPUs of a replica.", min=0)] = 0,
) -> None:
    """Serve a retriever with Search-R1's interface (POST /retrieve) on Ray, until interrupted.

    [dim]asyncrl serve retriever index --port 8000[/dim]
    """
    from asyncrl.serve.retriever import run

    with _bad_input():
        run(index, host, port, replicas, gpus)


@contextmanager
def _bad_input() -> Iterator[None]:
    """A ValueError in here is about what the user asked for."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _config_of(checkpoint: Path) -> Path:
    """The configuration of the run that a checkpoint (``RUN/checkpoints/NAME``) lies in."""
    config = checkpoint.resolve().parent.parent / "config.yaml"
    if not config.is_file():
        raise ConfigError(
            f"{checkpoint}: no config.yaml two folders up, so this is not a checkpoint of a run; "
            "give its configuration: asyncrl eval CONFIG --model FOLDER"
        )
    return config


def main() -> NoReturn:
    """Entry point: every outcome ends in one message at most and the exit code of the module's docstring."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        app()
        code = 0
    except asyncio.CancelledError:
        code = _say("terminated", 143)
    except ConfigError as error:
        code = _say(str(error), 2)
    except Exception as raised:
        cause: BaseException = raised
        while isinstance(cause, BaseExceptionGroup):  # of concurrent work: the first failure is the cause
            cause = cause.exceptions[0]
        logging.getLogger(__name__).debug("the command failed", exc_info=True)
        code = _say(f"{type(cause).__name__}: {cause}\n(asyncrl --debug ... shows where)", 1)
    sys.exit(code)


def _say(message: str, code: int) -> int:
    console = Console(stderr=True, soft_wrap=True)
    label = "" if code > 128 else "[bold red]error:[/bold red] "
    console.print(label + escape(message), highlight=False)
    return code


if __name__ == "__main__":
    main()
