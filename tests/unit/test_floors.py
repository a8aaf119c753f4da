"""The shape of the house: who may import whom, and how big a file may be."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_FILE_LINES = 600
MAX_LINES = 10_000


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    """Every module a file names in an import, at any depth of its code."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_imports_never_go_up() -> None:
    # In a process of its own: the linter's logging set-up silences every logger that exists.
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("room", ["tree", "algo", "text"])
def test_pure_rooms_know_nothing_of_torch_distributed(room: str) -> None:
    # import-linter sees other packages only as a whole, and algo may import torch.
    files = sources(f"asyncrl/{room}")
    assert files
    assert [path.name for path in files if "torch.distributed" in set(imported(path))] == []


def test_the_nouns_import_nothing_of_the_project() -> None:
    assert [name for name in imported(ROOT / "asyncrl/types.py") if name.startswith(("asyncrl", "envs"))] == []


def test_files_stay_small() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources("asyncrl", "envs")}
    assert {name: length for name, length in lengths.items() if length > MAX_FILE_LINES} == {}
    assert sum(length for name, length in lengths.items() if name.startswith("asyncrl/")) <= MAX_LINES


def test_every_module_says_what_it_is() -> None:
    files = [path for path in sources("asyncrl", "envs") if path.read_text().strip()]
    assert [str(path.relative_to(ROOT)) for path in files if not ast.get_docstring(ast.parse(path.read_text()))] == []
