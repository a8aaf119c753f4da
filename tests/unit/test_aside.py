"""Files and folders that are written aside."""

import asyncio
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from asyncrl.track import aside
from asyncrl.track.aside import clean, placing, remove, write_atomic


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary.json"
    write_atomic(path, "old")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_kill_left_of_a_write_is_gone_after_the_next(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    (tmp_path / ".summary.json.new").write_text("a half-written and rather long te")
    write_atomic(path, "new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def save(path: Path, text: str, error: BaseException | None = None) -> None:
    async def saving() -> None:
        async with placing(path) as partial:
            (partial / "state").mkdir(parents=True, exist_ok=True)
            (partial / "state" / "shard").write_text(text)
            if error is not None:
                raise error

    asyncio.run(saving())


def test_a_folder_takes_the_place_of_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "version-000003"
    for text in ("first", "second"):
        save(path, text)
        assert (path / "state" / "shard").read_text() == text
        assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError("no space left on device"), asyncio.CancelledError()])
def test_a_folder_that_is_not_finished_leaves_what_was_there(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "version-000003"
    save(path, "whole")
    with pytest.raises(type(error)):
        save(path, "half", error)
    assert (path / "state" / "shard").read_text() == "whole"
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_dying_process_still_writes_is_removed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left, rmtree = iter(range(3)), shutil.rmtree

    def while_it_writes(path: Path, **how: Any) -> None:
        rmtree(path, **how)
        if next(left, None) is not None:
            (path / "state").mkdir(parents=True)

    monkeypatch.setattr(aside.shutil, "rmtree", while_it_writes)
    with pytest.raises(RuntimeError, match="lost"):
        save(tmp_path / "version-000001", "half", RuntimeError("lost"))
    assert not any(tmp_path.iterdir())


def test_what_a_kill_left_is_gone_after_the_next(tmp_path: Path) -> None:
    path = tmp_path / "version-000001"
    for left in (".version-000001.partial", ".version-000001.gone"):
        (tmp_path / left / "state").mkdir(parents=True)
    save(path, "whole")
    assert list(tmp_path.iterdir()) == [path]
    remove(path)
    remove(path)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("failing", [1, 2])
def test_a_whole_folder_is_there_whichever_rename_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    path, calls, rename = tmp_path / "coldstart", iter(range(1, 9)), Path.rename
    save(path, "first")

    def fails(self: Path, target: Path) -> Path:
        if next(calls) == failing:
            raise OSError("input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(OSError, match="input/output"):
        save(path, "second")
    assert (path / "state" / "shard").read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


def test_a_kill_between_the_renames_leaves_the_old_folder_to_be_found(tmp_path: Path) -> None:
    path = tmp_path / "version-000003"
    save(path, "first")
    path.rename(tmp_path / ".version-000003.old")
    (tmp_path / ".version-000003.partial").mkdir()
    clean(tmp_path, "version-*")
    assert (path / "state" / "shard").read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]
