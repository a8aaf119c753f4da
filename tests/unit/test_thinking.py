"""The tensor core against a turn told step by step in float64, under every order in which an engine may run turns."""

import math
import random
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from asyncrl.config.thinking import ThinkingConfig
from asyncrl.engine.thinking import SCRAP, Report, Tag, Thinking, reasoning_tags

VOCAB = 24
THINK, CLOSE, LT, DOT_LT, SLASH, NAME, GT, NEWLINE, ACTION = range(9)
TAGS = [
    Tag([[THINK]], [[CLOSE]], [CLOSE, NEWLINE, ACTION]),
    # <explore> in pieces: "<" or ".<", then "explore"; its closer "</", then "explore".
    Tag([[LT, DOT_LT], [NAME]], [[SLASH], [NAME]], [SLASH, NAME, GT, NEWLINE, ACTION]),
]
CONFIG = ThinkingConfig(window=3, min_tokens=6, cap=14, top_j=5, series=True)


@dataclass
class Script:
    """A turn whose logits depend on its place alone: wild, then from ``settles`` on the same at every place."""

    seed: int
    settles: int = 1000
    temperature: float = 1.0
    written: dict[int, int] = field(default_factory=dict)
    """Tokens that the policy writes at these places, whatever it might have liked."""
    length: int = 24

    def logits(self, place: int) -> np.ndarray:
        source = np.random.default_rng([self.seed, min(place, self.settles)])
        logits = source.normal(0, source.uniform(0.5, 4), VOCAB).astype(np.float32)
        logits[[THINK, CLOSE, LT, DOT_LT, SLASH, NAME]] -= 30
        if place in self.written:
            logits[self.written[place]] = logits.max() + 30
        return logits

    def draw(self, place: int, scaled: np.ndarray) -> int:
        return int(np.argmax(scaled + np.random.default_rng([self.seed, place, 1]).gumbel(size=VOCAB)))


def told(script: Script, config: ThinkingConfig) -> tuple[list[int], dict]:
    """The turn in plain words: T2PO's pseudocode with lists."""
    tokens: list[int] = []
    hs, cs, ms, tops, logprobs, deltas = [], [], [], [], [], []
    queue, forced, rule, tag, opened, closed, thinking = [], [], "", 0, 0, False, None
    for t in range(script.length):
        x = script.logits(t).astype(np.float64)
        p = np.exp(x - x.max()) / np.exp(x - x.max()).sum()
        best = np.sort(p)[::-1]
        hs.append(-sum(float(q) * math.log(q) for q in p))
        cs.append(-sum(math.log(q) for q in best[: config.top_j]) / config.top_j)
        tops.append(-sum(float(q) * math.log(q) for q in best[:10]) / math.log(VOCAB))
        if config.norm == "running":
            hn, cn = scale(hs, hs[-1]), scale(cs, cs[-1])
        else:
            hn, cn = hs[-1] / math.log(VOCAB), float(p.max())
        ms.append(config.alpha * hn + (1 - config.alpha) * (1 - cn))
        if t:
            deltas.append(abs(ms[-1] - ms[-2]))
        window = deltas[-(config.window + 1) :]
        if config.tti and not queue and not rule and not closed:
            stable = (
                config.stable
                and t >= config.min_tokens
                and len(window) == config.window + 1
                and np.mean(window) < config.eps
            )
            if stable or t - opened >= config.cap:
                rule, queue = "stable" if stable else "cap", list(TAGS[tag].queue)
        scaled = x / script.temperature
        if queue:
            token = queue.pop(0)
            forced.append(t)
            logprobs.append(0.0)
        else:
            token = script.draw(t, scaled)
            logprobs.append(float(scaled[token] - scaled.max() - math.log(np.exp(scaled - scaled.max()).sum())))
        tokens.append(token)
        if not closed and (token == CLOSE or tokens[-2:] == [SLASH, NAME]):
            closed, thinking = True, t + 1 - (1 if token == CLOSE else 2) - opened
        elif not closed and token == THINK:
            tag, opened = 0, t + 1
        elif not closed and tokens[-2:] in ([LT, NAME], [DOT_LT, NAME]):
            tag, opened = 1, t + 1
    own = [t for t in range(script.length) if t not in forced]
    turn_h, turn_c = [hs[t] for t in own], [cs[t] for t in own]
    turn_m = [config.alpha * scale(turn_h, hs[t]) + (1 - config.alpha) * (1 - scale(turn_c, cs[t])) for t in own]
    return tokens, {
        "logprobs": logprobs,
        "phi": math.exp(np.mean([math.log(max(m, 1e-6)) for m in turn_m])),
        "entropy": np.mean(turn_h),
        "confidence": np.mean(turn_c),
        "top_entropy": np.mean([tops[t] for t in own if t < 20]),
        "thinking_tokens": script.length - opened if thinking is None else thinking,
        "rule": rule,
        "forced": (forced[0], forced[-1] + 1) if forced else (0, 0),
        "m": ms,
    }


def scale(values: list[float], value: float) -> float:
    low, high = min(values), max(values)
    return 0.0 if high - low < 1e-8 else (value - low) / (high - low)


class Engine:
    """Runs scripts in rows of a batch, in whatever order it is told to."""

    def __init__(self, config: ThinkingConfig | None, slots: int = 2) -> None:
        self.core = Thinking(config, TAGS, VOCAB, 24, torch.device("cpu"), slots)
        self.tokens: dict[str, list[int]] = {}

    def step(self, rows: list[tuple[str, Script] | None], partial: frozenset[str] = frozenset()) -> None:
        """One token for every row; None is a foreign request, and ``partial`` ones are in the middle of a prefill."""
        places = [len(self.tokens.setdefault(row[0], [])) if row else 0 for row in rows]
        slots = [self.core.admit(row[0], row[1].temperature) if row else SCRAP for row in rows]
        logits = torch.zeros(len(rows), VOCAB)
        for at, row in enumerate(rows):
            if row:
                noise = 7 * np.sin(np.arange(VOCAB)) if row[0] in partial else 0
                logits[at] = torch.tensor(row[1].logits(places[at]) + noise)
        self.core.step(logits, torch.tensor(slots), torch.tensor(places))
        drawn = []
        for at, row in enumerate(rows):
            if row is None or row[0] in partial:
                drawn.append(-1)
                continue
            logits[at] /= row[1].temperature or 1.0
            drawn.append(row[1].draw(places[at], logits[at].double().numpy()))
            self.tokens[row[0]].append(drawn[-1])
        logits.fill_(math.nan)  # the engine's own memory, which it goes on to use
        self.core.commit(torch.tensor(drawn))

    def finish(self, key: str) -> tuple[list[int], Report]:
        (report,) = self.core.report({key: len(self.tokens[key])}).get().values()
        self.core.drop(key)
        return self.tokens.pop(key), report


def alone(script: Script, config: ThinkingConfig | None = CONFIG) -> tuple[list[int], Report]:
    engine = Engine(config)
    for _ in range(script.length):
        engine.step([("k", script)])
    return engine.finish("k")


def assert_told(found: tuple[list[int], Report], script: Script, config: ThinkingConfig = CONFIG) -> None:
    tokens, exact = told(script, config)
    assert found[0] == tokens
    assert found[1].logprobs == pytest.approx(exact["logprobs"], abs=1e-4)
    signals = found[1].signals
    for name in ("phi", "entropy", "confidence", "top_entropy"):
        assert getattr(signals, name) == pytest.approx(exact[name], rel=1e-3, abs=1e-6), name
    for name in ("thinking_tokens", "rule", "forced"):
        assert getattr(signals, name) == exact[name], name
    if config.series:
        assert signals.m == pytest.approx(exact["m"], abs=1e-4)


scripts = st.builds(
    Script,
    seed=st.integers(0, 10**6),
    settles=st.one_of(st.just(1000), st.integers(0, 12)),
    temperature=st.sampled_from([1.0, 0.4]),
    written=st.sampled_from(
        [
            {},
            {0: THINK},
            {0: LT, 1: NAME},
            {0: DOT_LT, 1: NAME, 5: SLASH, 6: NAME},
            {0: THINK, 4: CLOSE},
            {2: THINK, 9: LT, 10: NAME},
        ]
    ),
    length=st.integers(1, 24),
)
configs = st.builds(
    CONFIG.model_copy,
    update=st.fixed_dictionaries(
        {
            "norm": st.sampled_from(["running", "fixed"]),
            "tti": st.booleans(),
            "stable": st.booleans(),
            "alpha": st.sampled_from([0.2, 0.4]),
        }
    ),
)


@settings(max_examples=25)
@given(scripts, configs)
def test_a_turn_is_what_the_pseudocode_says(script, config):
    assert_told(alone(script, config), script, config)


@pytest.mark.parametrize(("settles", "at"), [(0, 6), (1, 6), (2, 6), (3, 7), (4, 8), (9, 13)])
def test_thinking_that_stands_still_is_cut_at_the_token_the_formula_says(settles, at):
    """N + 1 = 4 changes of nothing after the settled token, and 6 tokens at least."""
    tokens, report = alone(Script(3, settles, written={0: THINK} if settles else {}))
    assert report.signals.rule == "stable"
    assert report.signals.forced == (at, at + 3)
    assert tokens[at : at + 3] == [CLOSE, NEWLINE, ACTION]
    assert (tokens.count(CLOSE), report.logprobs[at : at + 3]) == (1, [0.0] * 3)


def test_thinking_that_never_settles_is_cut_at_the_cap_counted_from_its_tag():
    tokens, report = alone(Script(3, written={2: THINK}))
    assert (report.signals.rule, report.signals.forced) == ("cap", (17, 20))
    assert report.signals.thinking_tokens == 14
    assert tokens[17:20] == [CLOSE, NEWLINE, ACTION]


def test_the_tag_that_is_open_is_the_one_that_is_closed():
    tokens, report = alone(Script(5, settles=3, written={0: DOT_LT, 1: NAME}))
    start, end = report.signals.forced
    assert tokens[start:end] == [SLASH, NAME, GT, NEWLINE, ACTION]
    assert report.signals.thinking_tokens == start - 2


@pytest.mark.parametrize("written", [{0: THINK, 4: CLOSE}, {0: LT, 1: NAME, 3: SLASH, 4: NAME}])
def test_closed_thinking_is_left_alone(written):
    _, report = alone(Script(5, settles=5, written=written))
    assert (report.signals.rule, report.signals.forced) == ("", (0, 0))
    assert report.signals.thinking_tokens == (3 if written[4] == CLOSE else 1)


def test_a_step_beyond_the_last_token_is_not_reported():
    """An engine that schedules ahead runs one before it learns that the turn has ended; this one would have fired."""
    script = Script(3, settles=3, length=7)
    engine = Engine(CONFIG)
    for _ in range(script.length):
        engine.step([("k", script)])
    engine.step([("k", script)], partial=frozenset("k"))
    engine.core.step(
        torch.tensor(script.logits(7))[None], torch.tensor([engine.core.admit("k", 1.0)]), torch.tensor([7])
    )
    assert_told(engine.finish("k"), script)
    assert alone(replace(script, length=8))[1].signals.rule == "stable"


def test_switched_off_it_measures_and_forces_nothing():
    script = Script(3, settles=2)
    _, on = alone(script)
    tokens, off = alone(script, CONFIG.model_copy(update={"tti": False}))
    assert on.signals.rule == "stable"
    assert (off.signals.rule, off.signals.forced) == ("", (0, 0))
    assert CLOSE not in tokens
    assert off.signals.phi > 0


@pytest.mark.parametrize("temperature", [1.0, 0.4, 0.0])
def test_log_probs_alone(temperature):
    script = Script(7, temperature=temperature or 1.0)
    engine = Engine(None)
    for _ in range(script.length):
        engine.step([("k", replace(script, temperature=temperature))])
    tokens, report = engine.finish("k")
    assert report.signals is None
    for place, (token, found) in enumerate(zip(tokens, report.logprobs, strict=True)):
        x = script.logits(place).astype(np.float64) / (temperature or 1.0)
        assert found == pytest.approx(x[token] - x.max() - math.log(np.exp(x - x.max()).sum()), abs=1e-5)


@settings(max_examples=20)
@given(st.lists(scripts, min_size=2, max_size=5), st.integers(0, 10**6).map(random.Random))
def test_no_order_of_running_them_makes_turns_influence_one_another(turns, chance):
    """Admission, neighbours, rows, preemption, partial prefills, discarded tokens and slots used before."""
    engine = Engine(CONFIG)
    waiting = {f"turn-{i}": script for i, script in enumerate(turns)}
    lost = dict(waiting)
    while waiting:
        batch = [key for key in waiting if chance.random() < 0.7] or [next(iter(waiting))]
        chance.shuffle(batch)
        rows = [(key, waiting[key]) for key in batch]
        if chance.random() < 0.3:
            rows.insert(chance.randrange(len(rows) + 1), None)
        engine.step(rows, frozenset(key for key in batch if chance.random() < 0.2))
        for key in batch:
            tokens = engine.tokens[key]
            if len(tokens) == waiting[key].length:
                assert_told(engine.finish(key), waiting.pop(key))
            elif tokens and chance.random() < 0.1:
                tokens.pop()  # sampled ahead, thrown away by a forced preemption
            elif tokens and key in lost and chance.random() < 0.05:
                del lost[key], engine.tokens[key]  # aborted, and begun anew
                if chance.random() < 0.5:
                    engine.core.drop(key)


def test_a_turn_keeps_its_slot_and_a_dropped_one_is_forgotten():
    core = Thinking(CONFIG, TAGS, VOCAB, 24, torch.device("cpu"), slots=2)
    first = core.admit("a", 1.0)
    assert core.admit("b", 1.0) != first
    assert core.admit("a", 1.0) == first != SCRAP
    core.drop("a")
    core.drop("a")
    with pytest.raises(KeyError, match="a"):
        core.report({"a": 1})
    assert core.admit("c", 1.0) == first


def test_reports_of_several_turns_are_each_their_own():
    engine, turns = Engine(CONFIG), {"a": Script(1, 2, length=9), "b": Script(2, 8, 0.4, {0: THINK}, 17)}
    for place in range(17):
        engine.step([(key, script) for key, script in turns.items() if place < script.length])
    both = engine.core.report({key: len(engine.tokens[key]) for key in turns}).get()
    for key, script in turns.items():
        assert_told((engine.tokens[key], both[key]), script)


# ---- tags in a tokenizer's ids ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Like Qwen3's: ``<think>`` is a token, ``<explore>`` comes in pieces that merge with what stands beside them."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    texts = ["<explore>look</explore>\n<action>go</action>", "done.</explore>\n", " explore.\n<explore> x"] * 20
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator(texts, trainer)
    bpe.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=bpe)


def shown(tokenizer: PreTrainedTokenizerFast, pattern: list[list[int]], text: str) -> bool:
    ids = tokenizer.encode(text, add_special_tokens=False)
    windows = [ids[at : at + len(pattern)] for at in range(len(ids) - len(pattern) + 1)]
    return any(all(id in allowed for id, allowed in zip(window, pattern, strict=True)) for window in windows)


def test_tags_in_pieces_are_found_whatever_they_merge_with(tokenizer):
    think, explore = reasoning_tags(tokenizer, ["think", "explore"], "\n<action>")
    assert think.opener == [[tokenizer.convert_tokens_to_ids("<think>")]]
    for text in ("<explore>", "go.\n<explore> x", "<think></think>.<explore>look"):
        assert shown(tokenizer, explore.opener, text), text
    for text in ("look</explore>", "done.</explore>\n", "x </explore>\n<action>"):
        assert shown(tokenizer, explore.closer, text), text
        assert not shown(tokenizer, explore.opener, text), text
    assert tokenizer.decode(explore.queue) == "</explore>\n<action>"
    assert think.queue[0] == tokenizer.convert_tokens_to_ids("</think>")
    assert tokenizer.decode(think.queue[1:]) == "\n<action>"


def test_search_forces_a_newline_alone(tokenizer):
    (think,) = reasoning_tags(tokenizer, ["think"], "\n")
    assert tokenizer.decode(think.queue) == "</think>\n"


def test_a_tokenizer_without_the_tag_and_a_tail_it_cannot_encode_are_refused(tokenizer):
    with pytest.raises(ValueError, match="<explore> and its closer must be single tokens"):
        reasoning_tags(tokenizer, ["explore"], "\n")
    words = Tokenizer(models.WordLevel({"<think>": 0, "</think>": 1, "?": 2}, unk_token="?"))
    with pytest.raises(ValueError, match=r"thinking\.tail '<action>'"):
        reasoning_tags(PreTrainedTokenizerFast(tokenizer_object=words), ["think"], "<action>")
