"""The benchmark of publishes from its command line, over a double of the measurement: a real model, no engine."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from asyncrl.bench import publish

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("--backend asyncrl_cpu --model tiny --dtype float32 --json {to}", 0, ""),
        ("--model tiny", 2, "--backend"),
        ("--backend smoke", 2, "'smoke' is not one of 'asyncrl_cpu'"),
    ],
)
def test_publish_from_the_command_line(
    line: str, code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def measured(backend: str, model: Path, dtype: str) -> dict[str, Any]:
        return {"backend": backend, "hidden": json.loads((model / "config.json").read_text())["hidden_size"]}

    monkeypatch.setattr(publish, "measure", measured)
    monkeypatch.setattr(publish.ray, "init", lambda *_, **__: nullcontext())
    monkeypatch.setenv("COLUMNS", "200")
    app, to = typer.Typer(), tmp_path / "publish.json"
    app.command()(publish.main)
    ended = CliRunner().invoke(app, line.format(to=to).split())
    assert ended.exit_code == code, ended.output
    assert said in ended.output
    if code == 0:
        report = json.loads(to.read_text())
        assert (report["backend"], report["model"], report["hidden"]) == ("asyncrl_cpu", "tiny", 128)
