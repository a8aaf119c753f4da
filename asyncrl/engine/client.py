"""What a sender says to generators, over Ray: the control plane of a publish.

Invariants: every call has a bound; none raises for a generator's failure: who fails is not called again in this round.
"""

import itertools
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import GetTimeoutError

from asyncrl.engine.base import cause_of

ROUNDS = itertools.count(1)
"""Numbers of transfers; a run's generators are sent to from one process only."""


class GeneratorClient:
    """vLLM's client protocol over actor handles by index of generator; unlike its own for Ray, it survives failures.

    ``collective``: the transfer needs everyone, so it fails for all when one does.
    """

    def __init__(self, handles: Mapping[int, Any], timeout_s: float, collective: bool = False) -> None:
        self.failed: dict[int, str] = {}
        """Why, by index; empty for those who failed only because another did."""
        self.group: Any = None
        """The sender's communicator, left when the collective fails."""
        self._handles, self._timeout_s, self._collective = dict(handles), timeout_s, collective
        self._round = 0

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        ranks = {at: {"rank_offset": rank} for rank, at in enumerate(self._handles, 1)} if self._collective else {}
        self._call("init_weight_transfer_engine", {at: (init_info | ranks.get(at, {}),) for at in self._handles})

    def start_weight_update(self) -> None:
        self._round = next(ROUNDS)
        self._call("start_weight_update", self._everyone(self._round))

    def update_weights(self, update_info: Any) -> None:
        self._call("update_weights", self._everyone(self._round, update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        # The label comes from the fleet, once it knows who holds the weights.
        self._call("finish_weight_update", self._everyone(self._round))

    def _everyone(self, *args: Any) -> dict[int, tuple[Any, ...]]:
        return dict.fromkeys(self._handles, args)

    def _call(self, method: str, args: Mapping[int, tuple[Any, ...]]) -> None:
        asked = [(at, handle) for at, handle in self._handles.items() if at not in self.failed]
        calls = {getattr(handle, method).remote(*args[at]): at for at, handle in asked}
        pending, until = list(calls), time.monotonic() + self._timeout_s
        while pending and not (self.failed and self._collective):
            done, pending = ray.wait(pending, timeout=max(0.0, until - time.monotonic()))
            for ref in done or pending:
                try:
                    ray.get(ref, timeout=0)
                except GetTimeoutError:
                    self.failed[calls[ref]] = f"{method} not answered in engine.publish_timeout_s = {self._timeout_s:g}"
                except Exception as error:
                    self.failed[calls[ref]] = f"{method} failed: {cause_of(error)}"
            if not done:
                break
        if self.failed and self._collective:
            self.failed = dict.fromkeys(self._handles, "") | self.failed
            leave(self.group)


def leave(group: Any) -> None:
    """End a vLLM communicator, if any, that a thread may be waiting in: its waits return, its broadcasts do nothing."""
    if group is not None:
        group.broadcast = lambda *args, **kwargs: None  # first: the communicator behind the real one is about to go
        group.destroy()
