"""The command line. Thin: every command is one call into a room, and rooms are imported only when called.

Exit codes: 0 done, 1 failed, 2 bad input (nothing was started), 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import logging
import signal
import sys
from asyncio import CancelledError
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from asyncrl.config.load import ConfigError, dump, load, validate
from asyncrl.config.run import RunConfig

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
app.add_typer(model_app, name="model")
app.add_typer(env_app, name="env")

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file, e.g. configs/quickstart.yaml")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="e.g. tree.leaves=16")]
EnvName = Annotated[str, typer.Argument(metavar="NAME", help="A registered name, or module:Class")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved configuration and stop.")]


@app.callback()
def _options(debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and debug logs.")] = False) -> None:
    level = logging.DEBUG if debug else logging.INFO
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("asyncrl").setLevel(level)


@app.command()
def train(config: Config, overrides: Overrides = None, dry_run: DryRun = False) -> None:
    """Train a policy: model, cold start where configured, then reinforcement learning.

    Writes a run folder (track.dir/track.name): resolved config, metrics, trees, checkpoints, summary.json.

    [dim]asyncrl train configs/scienceworld_spark_smoke.yaml runtime.updates=3 track.name=try[/dim]
    """
    resolved = load(config, overrides or ())
    if dry_run:
        typer.echo(dump(resolved), nl=False)
        return
    _preflight(resolved)
    from asyncrl.ops.job import run_job

    run_job(resolved)


@app.command("eval")
def evaluate(
    what: Annotated[Path, typer.Argument(metavar="CONFIG|CHECKPOINT", help="YAML file, or a checkpoint of a run")],
    overrides: Overrides = None,
    model: Annotated[Path | None, typer.Option(help="Model folder; default: the checkpoint, or model.path")] = None,
) -> None:
    """Measure a policy on the held-out split.

    A checkpoint is evaluated under the configuration of the run it lies in.

    [dim]asyncrl eval runs/quickstart/checkpoints/version-000060 eval.tasks=100[/dim]
    """
    checkpoint = what.is_dir()
    resolved = load(_config_of(what) if checkpoint else what, overrides or ())
    _preflight(resolved)
    from asyncrl.ops.single import evaluate_model

    evaluate_model(resolved, model or (what if checkpoint else None))


@app.command()
def sft(
    config: Config,
    out: Annotated[Path, typer.Option(help="Where the trained model goes.")],
    overrides: Overrides = None,
) -> None:
    """Run the cold start alone: supervised training on annotated expert trajectories.

    [dim]asyncrl sft configs/quickstart.yaml --out models/cold sft.epochs=2[/dim]
    """
    resolved = load(config, overrides or ())
    _preflight(resolved)
    from asyncrl.ops.single import cold_start_model

    cold_start_model(resolved, out)


@app.command()
def quickstart(overrides: Overrides = None) -> None:
    """Train a small agent on this machine's CPU, from nothing to runs/quickstart/summary.json.

    [dim]asyncrl quickstart runtime.seed=1[/dim]
    """
    from asyncrl.ops.quickstart import quickstart as run

    run(overrides or [])


@model_app.command("init")
def model_init(
    out: Annotated[Path, typer.Option(help="Folder to make.")],
    overrides: Overrides = None,
    env: Annotated[str, typer.Option(help="Environment whose words the tokenizer learns.")] = "pantry",
) -> None:
    """Make a tiny model with random weights and a tokenizer of the environment's own words.

    [dim]asyncrl model init --env pantry --out models/tiny model.tiny.layers=2 runtime.seed=1[/dim]
    """
    resolved = validate({"env": {"name": env}}, overrides or (), source="asyncrl model init")
    _preflight(resolved)
    from asyncrl.ops.single import init_model

    typer.echo(init_model(resolved, out))


@env_app.command("list")
def env_list() -> None:
    """Show the registered environments."""
    from asyncrl.env import REGISTRY

    for name, target in sorted(REGISTRY.items()):
        typer.echo(f"{name:16} {target}")


@env_app.command("check")
def env_check(name: EnvName) -> None:
    """Verify that an environment keeps the protocol: determinism, copies, replay, limits, types.

    [dim]asyncrl env check mypackage.envs:Maze[/dim]
    """
    _known(name)
    from asyncrl.ops.env_check import check

    check(name)


@env_app.command("play")
def env_play(name: EnvName, task: Annotated[str | None, typer.Option(help="Task id.")] = None) -> None:
    """Play an environment by hand, seeing exactly what an agent sees."""
    _known(name)
    from asyncrl.ops.env_play import play

    play(name, task)


def _preflight(config: RunConfig) -> None:
    """Refuse what cannot work before the heavy rooms are even imported."""
    from asyncrl.ops.preflight import preflight

    preflight(config)


def _known(name: str) -> None:
    from asyncrl.env import find_env

    try:
        find_env(name).env_class()
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _config_of(checkpoint: Path) -> Path:
    """The configuration of the run that a checkpoint (``RUN/checkpoints/NAME``) lies in."""
    config = checkpoint.resolve().parents[1] / "config.yaml"
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
    except KeyboardInterrupt:
        code = _say("interrupted", 130)
    except CancelledError:
        code = _say("terminated", 143)
    except ConfigError as error:
        code = _say(str(error), 2)
    except Exception as error:
        logging.getLogger(__name__).debug("the command failed", exc_info=True)
        code = _say(f"{type(error).__name__}: {error}\n(asyncrl --debug ... shows where)", 1)
    sys.exit(code)


def _say(message: str, code: int) -> int:
    console = Console(stderr=True, soft_wrap=True)
    label = "" if code > 128 else "[bold red]error:[/bold red] "
    console.print(label + escape(message), highlight=False)
    return code


if __name__ == "__main__":
    main()
