"""Checkpoints of a run: the learner's folder with the driver's state inside.

    version-000012/          a model in Hugging Face format
    version-000012/state/    weights and optimizer as DeepSpeed keeps them
    version-000012/run/      run.json (:class:`~asyncrl.runtime.state.RunState`, sizes of the run's files),
                             groups/KEY.pkl: groups that were complete but not yet trained

Invariants: a folder under its final name is complete, and of one moment: the state is taken before anything is awaited;
older ones are removed only after it; what an interrupted save leaves is removed, at the latest by the next run.
"""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.engine.waits import bounded
from asyncrl.learner.group import LearnerGroup
from asyncrl.rollout.coordinators import Expanded
from asyncrl.runtime.state import RunState
from asyncrl.track.aside import clean, placing, remove

SAVE_TIMEOUT_S = 600


class Checkpoints:
    def __init__(self, folder: Path, keep: int) -> None:
        self._folder, self._keep = folder, keep

    def latest(self) -> Path | None:
        """The newest checkpoint; what an interrupted save left is removed."""
        clean(self._folder, "version-*")
        return max(self._folder.glob("version-*"), default=None)

    async def save(self, learner: LearnerGroup, recorder: Any, state: RunState, facts: Mapping[str, Any]) -> None:
        """Write ``version-000012``; the newest ``keep`` stay.

        Args:
            recorder: handle of the actor that fetches the ready groups' bulk.
            facts: what the run itself wants to find again, as JSON.
        """
        run = json.dumps({"state": state.to_json(), **facts})
        ready = {key: ready.group for key, ready in state.ready.items()}
        path = self._folder / f"version-{state.version:06d}"
        async with placing(path) as partial:
            await learner.save(str(partial))
            groups = partial / "run" / "groups"
            groups.mkdir(parents=True)
            (groups.parent / "run.json").write_text(run)
            kept = [
                recorder.keep.remote(str(groups / f"{key}.pkl"), group.summary, group.samples, group.record)
                for key, group in ready.items()
            ]
            async with bounded(SAVE_TIMEOUT_S, "saving the groups that wait for training"):
                await asyncio.gather(*kept)
        for old in sorted(self._folder.glob("version-*"))[: -self._keep]:
            remove(old)


def read_facts(checkpoint: Path) -> dict[str, Any]:
    """What ``save`` wrote beside the model: ``state`` and the run's own facts.

    Raises FileNotFoundError: a checkpoint without the driver's state, e.g. one of a cold start.
    """
    return json.loads((checkpoint / "run" / "run.json").read_text())


async def restore(checkpoint: Path, recorder: Any) -> RunState:
    """The state of a checkpoint, its ready groups back in the object store."""
    facts = read_facts(checkpoint)["state"]
    groups: dict[int, Expanded] = {}
    for key in facts["ready"]:
        path = checkpoint / "run" / "groups" / f"{key}.pkl"
        summary, samples, record = recorder.bring.options(num_returns=3).remote(str(path))
        async with bounded(SAVE_TIMEOUT_S, f"reading {path}"):
            groups[int(key)] = Expanded(await summary, samples, record)
    return RunState.from_json(facts, groups)
