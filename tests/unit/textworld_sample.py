"""Four games that integration makes, and TextWorld with these alone, so that the checker draws from them."""

from collections.abc import Sequence

from envs.textworld.env import TextWorld

COIN, TREASURE, MEAL, TEST_MEAL = "coin_collector-105-3", "treasure_hunter-5-1", "cooking-2-0", "cooking-1-1000000"
GAMES = (COIN, TREASURE, MEAL, TEST_MEAL)


class FourGames(TextWorld):
    @classmethod
    def tasks(cls, split: str) -> Sequence[str]:
        splits = {"train": GAMES[:3], "test": GAMES[3:]}
        if split not in splits:
            raise ValueError(f"no split {split!r}")
        return splits[split]
