"""What ``python -m envs.measure`` says of environments whose figures are known beforehand."""

import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from asyncrl.env import EnvSpec
from envs.measure import Figures, measure, measure_apart, resident_mb, table
from envs.names import read_name
from envs.prefixes import verify


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    here = str(Path(__file__).parent)
    monkeypatch.syspath_prepend(here)
    monkeypatch.setenv("PYTHONPATH", here, prepend=":")


def test_figures_of_sokoban_in_pictures() -> None:
    found = measure(read_name("sokoban,mode=image"), "train", tasks=12, seconds=60, seed=3)
    assert found.name == "sokoban mode=image" and not found.problem
    assert (found.expert, found.expert_tasks, found.random_tasks) == (1.0, 12, 12)
    assert found.random is not None and found.random < 1 and 12 <= found.steps <= 12 * 15
    assert found.steps_per_s is not None and found.steps_per_s_with_resets is not None
    assert 0 < found.steps_per_s_with_resets < found.steps_per_s
    assert 0 < (found.reset_ms or 0) <= (found.reset_p95_ms or 0)
    assert all(found.branch_ms[depth] for depth in ("10", "30"))  # deeper than the 15 turns of an episode
    assert found.fits is not None and found.fits >= 1


@pytest.mark.parametrize("name", ["Sound", "Replayed"])
def test_both_ways_to_branch_are_timed(name: str) -> None:
    found = measure(EnvSpec(name, f"broken_envs:{name}"), "train", tasks=6, seconds=60, seed=0)
    assert found.branch_ms["10"] and found.expert == 1.0


def test_a_branch_that_differs_is_no_figure() -> None:
    with pytest.raises(RuntimeError, match="diverged"):
        measure(EnvSpec("Random", "broken_envs:Random", {}), "train", tasks=2, seconds=60, seed=0)


def test_missing_data_keeps_its_row_and_says_what_to_do(tmp_path: Path) -> None:
    row = measure_apart(read_name(f"alfworld,data={tmp_path}"), "train", 1, 1, 0)
    assert "alfworld-download" in row.problem and row.reset_ms is None
    shown = table([row])
    assert f"| alfworld data={tmp_path} | – |" in shown
    assert shown.endswith(f"not measured: {row.problem}")


def test_memory_counts_children() -> None:
    alone = resident_mb(os.getpid())
    code = "import sys; kept = b'x' * 2**26; sys.stdout.write('.'); sys.stdout.flush(); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.read(1) == b"."
        assert resident_mb(os.getpid()) > alone + 60
    finally:
        child.communicate()


def test_names_carry_options() -> None:
    spec = read_name("ezpoints,mode=image,max_turns=6")
    assert dict(spec.options) == {"mode": "image", "max_turns": 6}
    with closing(spec.make()) as env:
        assert env.max_turns == 6 and env.image_shape is not None
    with pytest.raises(ValueError, match="option 'mode' has no value"):
        read_name("ezpoints,mode")
    with pytest.raises(ValueError, match="'turns'; ezpoints takes mode, max_turns"):
        read_name("ezpoints,turns=6")


def test_the_command_prints_a_table_and_keeps_its_figures(tmp_path: Path) -> None:
    kept = tmp_path / "figures.json"
    command = [sys.executable, "-m", "envs.measure", "pantry", "--tasks", "5", "--json", str(kept)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    (row,) = json.loads(kept.read_text())
    figures = Figures(**row)
    assert done.stdout == table([figures]) + "\n"
    assert "pantry: expert" in done.stderr and figures.random_tasks == 5


@pytest.mark.parametrize(("name", "differ"), [("Replayed", 0), ("Random", 6), ("Sound", 0)])
def test_prefixes_that_differ_are_told(name: str, differ: int) -> None:
    found = list(verify(EnvSpec(name, f"broken_envs:{name}"), "train", 6, seed=0))
    assert len(found) == 6 and sum(bool(problem) for _, problem in found) == differ
    assert all(trace.steps for trace, _ in found)
