"""Checkpoints of a run. Invariant: a folder under its final name is complete; older ones are removed only after it."""

from __future__ import annotations

import shutil
from pathlib import Path

from asyncrl.learner.group import LearnerGroup


class Checkpoints:
    def __init__(self, folder: Path, keep: int) -> None:
        self._folder, self._keep = folder, keep

    async def save(self, learner: LearnerGroup, version: int) -> Path:
        """Write ``version-000012`` in Hugging Face format, with the optimizer's state inside."""
        path = self._folder / f"version-{version:06d}"
        await learner.save(str(path))
        for old in sorted(self._folder.glob("version-*"))[: -self._keep]:
            shutil.rmtree(old)
        return path
