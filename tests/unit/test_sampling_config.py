"""Sampling whose log-probs would not describe what was sampled is refused, with the reason."""

import sys
from pathlib import Path

import pytest

from asyncrl import cli
from asyncrl.config.load import ConfigError, load

BASE = "env: {name: pantry}\n"


@pytest.mark.parametrize(
    "override",
    [
        "top_p=0.9",
        "top_p=1",
        "top_k=20",
        "min_p=0.1",
        "repetition_penalty=1.1",
        "presence_penalty=0.5",
        "frequency_penalty=0.5",
    ],
)
def test_distorted_sampling_is_refused_with_the_reason(
    override: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(BASE)
    monkeypatch.setattr(sys, "argv", ["asyncrl", "train", str(path), f"sampling.{override}"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    told = " ".join(capsys.readouterr().err.split())
    for part in (f"sampling: {override.split('=')[0]}: refused", "another distribution", "set temperature"):
        assert part in told, told


def test_all_of_them_are_named_and_other_unknown_keys_stay_unknown(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(BASE + "sampling: {top_k: 5, top_p: 0.9}\n")
    with pytest.raises(ConfigError, match=r"sampling: top_p, top_k: refused"):
        load(path)
    path.write_text(BASE + "sampling: {temprature: 0.9}\n")
    with pytest.raises(ConfigError, match=r"sampling\.temprature: unknown key; did you mean 'temperature'"):
        load(path)
    path.write_text(BASE + "sampling: 3\n")
    with pytest.raises(ConfigError, match="sampling: expected a section"):
        load(path)
