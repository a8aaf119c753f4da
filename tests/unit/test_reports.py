"""Fetching what the engine kept of turns, over a double of the engine that answers when it likes."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from asyncrl.engine.reports import Reports


class Llm:
    """Keeps turns ``late`` for some calls before it gives them out, as a device does."""

    def __init__(self, late: int = 0, fails: int = 0, unknown: tuple[str, ...] = ()) -> None:
        self.late, self.fails, self.unknown = late, fails, unknown
        self.asked: list[list[str]] = []
        self.kept: dict[str, tuple[int, int]] = {}
        self.inside = 0

    async def collective_rpc(self, method: str, args: tuple[Mapping[str, int]]) -> list[dict[str, Any]]:
        assert method == "take_turns"
        assert not self.inside, "two calls at a time"
        self.inside += 1
        (lengths,) = args
        self.asked.append(list(lengths))
        await asyncio.sleep(0)
        self.inside -= 1
        if self.fails:
            self.fails -= 1
            raise ConnectionError("no engine")
        self.kept = {name: (length, calls - 1) for name, (length, calls) in self.kept.items()}
        self.kept |= {name: (length, self.late) for name, length in lengths.items() if name not in self.unknown}
        given = {name: ([float(length)], None) for name, (length, calls) in self.kept.items() if calls <= 0}
        self.kept = {name: rest for name, rest in self.kept.items() if name not in given}
        return [given | dict.fromkeys(set(lengths) & set(self.unknown))]


@pytest.mark.parametrize("late", [0, 1, 3])
def test_each_turn_gets_its_own_report_however_late_and_is_asked_for_once(late: int) -> None:
    async def run() -> tuple[Llm, list[Any]]:
        llm, reports = Llm(late), Reports()
        first = [asyncio.create_task(reports.take(llm, f"a{i}", i)) for i in range(5)]
        await asyncio.sleep(0.004)
        return llm, await asyncio.gather(*first, *(reports.take(llm, f"b{i}", 10 + i) for i in range(3)))

    llm, found = asyncio.run(run())
    assert found == [([float(n)], None) for n in (0, 1, 2, 3, 4, 10, 11, 12)]
    assert sorted(name for call in llm.asked for name in call) == ["a0", "a1", "a2", "a3", "a4", "b0", "b1", "b2"]
    assert llm.asked[0] == ["a0", "a1", "a2", "a3", "a4"]  # together


def test_an_unknown_turn_fails_alone_and_one_that_is_no_longer_awaited_harms_nobody() -> None:
    async def run() -> list[Any]:
        llm, reports = Llm(late=1, unknown=("lost",)), Reports()
        takes = [asyncio.create_task(reports.take(llm, name, 1)) for name in ("kept", "lost", "left")]
        await asyncio.sleep(0)
        takes[2].cancel()
        return await asyncio.gather(*takes, return_exceptions=True)

    kept, lost, left = asyncio.run(run())
    assert kept == ([1.0], None)
    assert "turn lost: it does not know the turn" in str(lost)
    assert isinstance(left, asyncio.CancelledError)


def test_a_call_that_fails_is_told_to_those_it_was_for_and_the_next_goes_through() -> None:
    async def run() -> list[Any]:
        llm, reports = Llm(fails=1), Reports()
        failed = asyncio.create_task(reports.take(llm, "first", 1))
        for _ in range(3):
            await asyncio.sleep(0)
        assert llm.asked == [["first"]]
        later = asyncio.create_task(reports.take(llm, "second", 2))  # while that call is on its way
        return await asyncio.gather(failed, later, return_exceptions=True)

    first, second = asyncio.run(run())
    assert isinstance(first, RuntimeError) and "no engine" in str(first)
    assert second == ([2.0], None)
