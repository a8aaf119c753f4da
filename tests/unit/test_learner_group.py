"""What the learner group does when a call does not come back as it should; ranks are stand-ins, Ray is not started."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.learner import LearnerConfig
from asyncrl.learner import group as module
from asyncrl.learner.group import LearnerError, LearnerGroup
from asyncrl.track.aside import placing


class Rank:
    """A rank whose ``save`` behaves as told and whose call fails once it has been killed, as Ray's do."""

    def __init__(self, save: Callable[[str], Any] | None = None) -> None:
        self.save = self
        self._save = save
        self.killed: asyncio.Event | None = None

    def remote(self, path: str) -> asyncio.Future[None]:
        self.killed = asyncio.Event()
        return asyncio.ensure_future(self._run(path))

    async def _run(self, path: str) -> None:
        assert self.killed is not None
        if self._save is not None:
            return self._save(path)
        await self.killed.wait()
        raise RuntimeError("killed")


def begin(path: str) -> None:
    (Path(path) / "state").mkdir(parents=True)
    (Path(path) / "state" / "shard").write_text("half")


async def save(group: LearnerGroup, path: Path) -> None:
    async with placing(path) as partial:
        await group.save(str(partial))


@pytest.fixture(autouse=True)
def kill(monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(rank: Rank) -> None:
        if rank.killed is not None:
            rank.killed.set()

    monkeypatch.setattr(module.ray, "kill", kill)
    monkeypatch.setattr(module, "GRACE_S", 0.05)


def test_a_cancelled_save_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "version-000003"
    (tmp_path / "version-000002").mkdir()

    async def interrupted() -> None:
        saving = asyncio.create_task(save(LearnerGroup([Rank(), Rank()], LearnerConfig()), path))
        await asyncio.sleep(0)
        begin(str(tmp_path / f".{path.name}.partial"))
        await asyncio.sleep(0)
        saving.cancel()
        await saving

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(interrupted())
    assert [entry.name for entry in tmp_path.iterdir()] == ["version-000002"]


def test_a_failed_save_ends_the_group_and_leaves_the_checkpoint_it_was_to_replace(tmp_path: Path) -> None:
    path = tmp_path / "version-000003"
    path.mkdir()
    (path / "config.json").write_text("whole")

    def fail(target: str) -> None:
        begin(target)
        raise OSError("no space left on device")

    group = LearnerGroup([Rank(fail), Rank()], LearnerConfig())
    with pytest.raises(LearnerError, match="rank 0 failed in save: no space left"):
        asyncio.run(save(group, path))
    assert [entry.name for entry in tmp_path.iterdir()] == ["version-000003"]
    assert (path / "config.json").read_text() == "whole"
    with pytest.raises(LearnerError, match="has ended: rank 0 failed in save"):
        asyncio.run(save(group, path))


def test_a_late_save_ends_the_group_and_leaves_nothing_behind(tmp_path: Path) -> None:
    group = LearnerGroup([Rank(begin), Rank()], LearnerConfig(update_timeout_s=0.05))
    with pytest.raises(LearnerError, match=r"rank\(s\) \[1\] did not finish save within 0\.05 s"):
        asyncio.run(save(group, tmp_path / "version-000001"))
    assert not any(tmp_path.iterdir())
