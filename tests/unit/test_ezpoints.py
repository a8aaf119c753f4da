"""EZPoints: deals, the formula reader against Python's own and against hostile text, the rules, copies, pictures."""

import hashlib
import itertools
import os
import pickle
import random
import subprocess
import sys
import time
import warnings
from contextlib import suppress
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config.load import load
from asyncrl.env import Trace, find_env, replay
from asyncrl.types import Step, Task
from envs.check import check
from envs.ezpoints import SYMBOLS, EZPoints, State, deal
from envs.ezpoints_formula import MAX_CHARS, FormulaError, evaluate
from envs.ezpoints_picture import draw
from envs.gym import register

PAIRS = [(2, 6), (2, 10), (3, 4), (3, 9), (4, 8), (5, 7), (6, 6)]


def task(task_id: int, seed: int = 0) -> Task:
    return Task("ezpoints", str(task_id), seed)


def play(numbers: tuple[int, int], *actions: str) -> list[Step]:
    env = EZPoints()
    env.restore(State(("H2", "H2"), numbers))
    return [env.step(action) for action in actions]


def test_splits_are_the_papers_ranges_and_never_change() -> None:
    train, test = EZPoints.tasks("train"), EZPoints.tasks("test")
    assert (train[0], train[-1], len(train)) == ("0", "65534", 65_535)
    assert (test[0], test[-1], len(test)) == ("65536", "66535", 1_000)
    ids = hashlib.sha256("\n".join([*train, *test]).encode()).hexdigest()
    assert ids.startswith("27c8723d900f8951")
    with pytest.raises(ValueError, match="train, test"):
        EZPoints.tasks("dev")


def test_deals_never_change_and_are_the_same_in_every_process() -> None:
    code = (
        "from envs.ezpoints import deal\nfrom asyncrl.types import Task\n"
        "print([tuple(deal(Task('ezpoints', str(i), 3))[:2]) for i in range(100)])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": salt}, capture_output=True, check=True
        ).stdout
        for salt in ("1", "2")
    }
    (deals,) = outputs
    assert hashlib.sha256(deals.strip()).hexdigest().startswith("f54f7d8c904e2f5b")


@pytest.mark.parametrize("bad", ["4294967295", "-1", "x", "", "1.5", "²", "٣", "9" * 5000])
def test_an_unknown_task_is_refused(bad: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - int() itself refuses the longest
        EZPoints().reset(Task("ezpoints", bad))


@pytest.mark.parametrize(("options", "named"), [({"mode": "rgb_array"}, "mode"), ({"max_turns": 3}, "max_turns")])
def test_a_bad_option_is_refused(options: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        EZPoints(**options)  # type: ignore[arg-type]


def test_deals_follow_the_rule() -> None:
    deals = [deal(task(i)) for i in range(20_000)]
    names = {**{n: str(n) for n in range(2, 10)}, 10: "T"}
    for state in deals:
        for card, number in zip(state.cards, state.numbers, strict=True):
            assert card[0] in "HSDC" and card[1:] in ((*"TJQK",) if number == 10 else (names[number],))
        a, b = sorted(state.numbers)
        assert (a, b) in PAIRS
    share = {pair: sum(tuple(sorted(d.numbers)) == pair for d in deals) / len(deals) for pair in PAIRS}
    # The first card has 12 ranks, four of them worth 10: e.g. (2, 10) is a 2 that adds (1/24) or a ten (4/12).
    expected = {(2, 6): 2 / 24, (2, 10): 1 / 24 + 4 / 12, (3, 4): 2 / 24, (3, 9): 1 / 24 + 1 / 12}
    expected |= {(4, 8): 1 / 24 + 1 / 12, (5, 7): 2 / 12, (6, 6): 1 / 24}
    assert share == pytest.approx(expected, abs=0.012)
    assert sum(d.cards[0][0] == "H" for d in deals) / len(deals) == pytest.approx(0.25, abs=0.012)
    tens = [d for d in deals if "J" in "".join(d.cards)]
    assert sum("J" in d.cards[0] for d in tens) / len(tens) == pytest.approx(0.5, abs=0.04)  # either side


@given(st.text("0123456789+* ", max_size=MAX_CHARS))
def test_a_formula_is_worth_what_python_says(formula: str) -> None:
    try:
        expected = None if "**" in formula else eval(formula.lstrip())  # the oracle; powers are not the game's
    except SyntaxError:
        expected = None
    try:
        got = evaluate(formula)
    except FormulaError:
        got = None
    if expected is None and got is not None:
        # Python alone refuses numbers that begin with 0.
        assert any(part.strip().startswith("0") for part in formula.replace("*", "+").split("+"))
    else:
        assert got == expected


@pytest.mark.parametrize(
    ("formula", "value"),
    [("6*2", 12), ("2+10", 12), ("+6*+2", 12), ("6 *2", 12), ("2+3*4", 14), ("3*4+2", 14), ("  12 ", 12), ("++3", 3)],
)
def test_formulas_by_hand(formula: str, value: int) -> None:
    assert evaluate(formula) == value


HOSTILE = [
    "",
    " ",
    "+",
    "6*",
    "*6",
    "6 6",
    "6**2",
    "9**9**9**9",
    "9*" * 10_000_000 + "9",
    "9" * 10_000_000,
    "(" * 100_000 + "12" + ")" * 100_000,
    "(12)",
    "[12]",
    "-12",
    "12/1",
    "12/0",
    "12//0",
    "12%0",
    "1e999",
    "0x0c",
    "1_2",
    "12.0",
    "12;",
    "12#",
    "12\n",
    "6*2=12",
    "12==12",
    "True*12",
    "x",
    "None",
    "lambda: 12",
    "().__class__.__bases__[0].__subclasses__()",
    "__import__('os').system('true')",
    "exit()",
    "'a'*1000000000",
    "{12}",
    "\x0012",
    "12\u202e",
    "\ud800",
    "١٢",
    "１２",
    "1²",
    "Ⅻ",
    "6×2",
    "6*\u00a02",
]


@pytest.mark.parametrize("formula", HOSTILE, ids=lambda text: ascii(text)[:20])
def test_hostile_text_is_refused_at_once(formula: str) -> None:
    start = time.process_time()
    with pytest.raises(FormulaError):
        evaluate(formula)
    assert time.process_time() - start < 0.05


@given(st.text())
def test_any_text_is_a_number_or_refused(text: str) -> None:
    with suppress(FormulaError):
        assert evaluate(text) >= 0


@pytest.mark.parametrize("numbers", PAIRS)
def test_every_formula_the_game_can_form_pays_as_the_original_says(numbers: tuple[int, int]) -> None:
    """All symbols that matter (the two cards, a number that is on neither, + and *) in all orders, up to four."""
    a, b = map(str, numbers)
    wins = 0
    for length in range(5):
        for symbols in itertools.product(dict.fromkeys((a, b, "1", "+", "*")), repeat=length):
            formula, spent, expected = "", [], []
            for symbol in symbols:
                refused = symbol.isdigit() and [*spent, symbol].count(symbol) > [a, b].count(symbol)
                formula += " " if refused else symbol
                spent += [symbol] if symbol.isdigit() and not refused else []
                expected.append(-1 if refused else 0)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    twelve = eval(formula.lstrip()) == 12  # what the original does
            except SyntaxError:
                twelve = False
            won = twelve and len(spent) == 2
            steps = play(numbers, *symbols, "=")
            assert [step.reward for step in steps] == [*expected, 10 if won else -1]
            assert [step.terminated for step in steps] == [False] * length + [True]
            assert steps[-1].info == {"success": won}
            wins += won
    assert wins >= 3  # 6+6, +6+6, 6++6


def test_what_is_no_symbol_changes_nothing_and_costs_only_the_turn() -> None:
    env = EZPoints()
    first = env.reset(task(0))
    for action in ("", "11", "0", "-", "6*2", "twelve", "６", "{}"):
        step = env.step(action)
        assert step.reward == 0 and step.observation.text == first.text
    assert step.truncated and step.info == {"success": False}


def test_a_full_formula_ends_the_episode() -> None:
    steps = play((6, 2), *"++++++", "=")
    assert [step.reward for step in steps] == [0.0] * 6 + [-1.0]
    assert [step.truncated for step in steps] == [False] * 6 + [True]
    assert not steps[-1].terminated and steps[-1].info == {"success": False}
    late = play((6, 2), "?", "6", "1", "*", "2", "=")
    assert [step.reward for step in late] == [0, 0, -1, 0, 0, 10]
    assert [step.reward for step in play((6, 2), *"+6*+2=")] == [0] * 5 + [10]


def test_eight_turns_end_the_episode() -> None:
    steps = play((6, 2), "?", "?", *"++++++")
    assert [step.truncated for step in steps] == [False] * 7 + [True]
    last = play((6, 2), "?", "?", "?", "?", "6", "*", "2", "=")[-1]
    assert last.terminated and not last.truncated and last.info == {"success": True}


def test_nothing_happens_after_the_end() -> None:
    *_, end, after = play((6, 2), "6", "*", "2", "=", "=")
    assert end.observation.actions == after.observation.actions == ()
    assert after.reward == 0 and after.done


def test_text_observations_are_the_originals() -> None:
    env = EZPoints()
    assert env.restore(State(("D6", "SK"), (6, 10))).text == "Cards: ['D6', 'SK'], Numbers: [6, 10], Formula: []"
    env.step("10")
    assert env.step("+").observation.text == "Cards: ['D6', 'SK'], Numbers: [6, 10], Formula: [10, '+']"
    assert env.step("10").observation.text == "Cards: ['D6', 'SK'], Numbers: [6, 10], Formula: [10, '+', ' ']"


def test_the_known_answer_wins_and_chance_hardly_ever_does() -> None:
    env, rng, solved, lucky = EZPoints(), random.Random(0), 0, 0
    for i in range(65_536, 65_736):
        answer = env.expert(task(i))
        assert answer is not None and env.snapshot().turns == 0
        steps = [env.step(symbol) for symbol in answer]
        assert [step.reward for step in steps] == [0, 0, 0, 10]
        solved += steps[-1].info["success"]
        env.reset(task(i))
        while not (step := env.step(rng.choice(SYMBOLS))).done:
            pass
        lucky += step.info["success"]
    assert solved == 200 and lucky < 5


def test_the_expert_goes_on_after_a_slip_that_can_be_mended() -> None:
    rng, env, won, lost = random.Random(3), EZPoints(), 0, 0
    for i in range(200):
        env.reset(task(i))
        slip, turn, step = rng.randrange(4), 0, None
        while (symbol := env.expert_action()) is not None:
            step = env.step(rng.choice(SYMBOLS) if turn == slip else symbol)
            turn += 1
        assert step is not None
        won, lost = won + bool(step.info.get("success")), lost + (not step.done)
    assert won > 80 and lost > 20


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 66_535),
    *[st.lists(st.sampled_from([*SYMBOLS, "pass"]), max_size=6)] * 3,
    st.sampled_from(["text", "image"]),
)
def test_a_copy_has_the_same_future(task_id: int, stem: list[str], other: list[str], on: list[str], mode: str) -> None:
    env, copy = EZPoints(mode), EZPoints(mode)  # type: ignore[arg-type]
    seen = env.reset(task(task_id))
    for action in stem:
        seen = env.step(action).observation
    kept = pickle.dumps(env.snapshot())
    future = [env.step(action) for action in on]
    for target in (copy, env):
        for action in other:
            target.step(action)
        assert target.restore(pickle.loads(kept)).same_as(seen)
        for action, expected in zip(on, future, strict=True):
            step = target.step(action)
            assert step.observation.same_as(expected.observation) and step[1:] == expected[1:]


def test_two_hundred_random_prefixes_replay_exactly() -> None:
    rng, env, other = random.Random(2), EZPoints(), EZPoints()
    for i in range(200):
        chosen = task(rng.randrange(2**32 - 1), i % 3)
        trace = Trace(chosen, env.reset(chosen))
        for _ in range(rng.randrange(9)):
            if trace.steps and trace.steps[-1].done:
                break
            action = rng.choice([*SYMBOLS[:-1], "pass"])
            trace.add(action, env.step(action))
        assert replay(other, trace, env.list_actions()).same_as(trace.last)


def test_a_picture_shows_cards_and_formula_and_the_words_only_the_formula() -> None:
    env, looks, words = EZPoints("image"), set(), set()
    for i in range(300):
        seen = env.reset(task(i))
        assert seen.image is not None and seen.image.dtype == np.uint8
        assert seen.image.shape == env.image_shape == (300, 300, 3)
        looks.add((env.snapshot().cards, hashlib.sha256(seen.image.tobytes()).digest()))
        words.add(seen.text)
    assert len(words) == 1
    assert len(looks) == len({cards for cards, _ in looks}) == len({look for _, look in looks})
    symbol = env.expert_action()
    assert symbol is not None
    after = env.step(symbol).observation
    assert after.text.endswith(f"Formula: {symbol}") and not np.array_equal(after.image, seen.image)
    assert np.array_equal(after.image[:245], seen.image[:245])  # the cards lie still
    assert seen.anchor == EZPoints().reset(task(299)).text


def test_the_picture_has_the_originals_layout() -> None:
    image = draw(("D6", "SK"), ())
    table = (0x35, 0x65, 0x4D)
    rows, columns = np.where((image != table).any(axis=2)[:245])
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (55, 243, 5, 287)
    assert (image[150, 140:153] == table).all()  # a gap between the cards
    assert (image[258:280, 10:60] == 255).any()


@pytest.mark.parametrize("mode", ["text", "image"])
def test_it_keeps_the_protocol(mode: str) -> None:
    report = check(find_env("ezpoints", {"mode": mode}))
    assert report.passed, "\n".join(report.lines())
    assert report.figures["expert_success"] == 1


@pytest.mark.parametrize("mode", ["text", "image"])
def test_gymnasiums_checker_has_nothing_to_say(mode: str) -> None:
    register()
    env = gymnasium.make("asyncrl/EZPoints-v0", mode=mode)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env.unwrapped)
    seen, _ = env.reset(options={"task_id": "7"})
    assert set(seen) == {"goal", "text"} | ({"image"} if mode == "image" else set())


def test_the_recipe_is_sparks() -> None:
    config = load(Path(__file__).parents[2] / "configs" / "ezpoints_spark.yaml")
    assert (config.tree.roots, config.tree.branch, config.tree.leaves, config.tree.criterion) == (4, 2, 8, "explore")
    assert (config.runtime.groups_per_batch, config.runtime.versions, config.learner.lr) == (16, 120, 1e-6)
    assert (config.prompt.max_prompt_tokens, config.sampling.max_tokens) == (1024, 512)
    env = find_env(config.env.name, config.env.options).make()
    assert isinstance(env, EZPoints) and env.max_turns == 8
