"""The numbers of a completed group, and their sums. Invariant: they are a function of the groups alone, and small."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Self

from asyncrl.algo.staleness import spread
from asyncrl.types import Group, Probe, TurnSample, token_digest


@dataclass
class Sums:
    """What adds up over groups."""

    leaves: int = 0
    successes: int = 0
    turns: int = 0
    valid_turns: int = 0
    exploring_turns: int = 0
    branched_turns: int = 0
    """Turns with more than one child."""
    leaf_turns: int = 0
    """Turns of all root-to-leaf paths: each turn once for every leaf below it."""
    tokens: int = 0
    """Generated tokens, each shared turn once."""
    prompt_tokens: int = 0
    seconds: float = 0.0


@dataclass(kw_only=True)
class GroupSummary(Sums):
    spans: dict[tuple[int, int], int]
    """Turns by (first, last) version of their tokens, as the engine reports them."""
    sibling_spreads: dict[int, int]
    """Branched turns by the spread in versions of their children's first turns (:func:`spread`)."""
    counters: dict[str, int]
    probe: Probe
    """One of its turns."""
    trained_tokens: int
    """What its samples weigh in the loss; an optimizer step on groups without any is left out."""
    digest: str
    """:func:`token_digest` of all response ids, in the order of the rows."""
    thinking: dict[str, list[float]]
    """Of the turns that the engine measured: their ``phi`` and ``tokens`` of thinking; and ``gamma``, the change of phi
    from each turn to the next, or ``gamma_mixed`` where another version made that one."""


@dataclass
class Tally(Sums):
    """Sums over groups in any order; shares are worked out from them, and are 0 of nothing."""

    groups: int = 0
    leaves_max: int = 0
    """Most leaves of one group."""
    counters: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, summaries: Iterable[GroupSummary]) -> Self:
        tally = cls()
        for summary in summaries:
            tally.add(summary)
        return tally

    def add(self, summary: GroupSummary) -> None:
        for each in fields(Sums):
            setattr(self, each.name, getattr(self, each.name) + getattr(summary, each.name))
        self.groups += 1
        self.leaves_max = max(self.leaves_max, summary.leaves)
        self.counters.update(summary.counters)

    @property
    def success(self) -> float:
        """Share of leaves."""
        return self.successes / max(1, self.leaves)

    @property
    def valid(self) -> float:
        """Share of turns."""
        return self.valid_turns / max(1, self.turns)

    @property
    def branched(self) -> float:
        """Share of turns."""
        return self.branched_turns / max(1, self.turns)

    @property
    def leaf_turns_mean(self) -> float:
        """Turns of a root-to-leaf path."""
        return self.leaf_turns / max(1, self.leaves)


def summarise(group: Group, probe_tokens: int, samples: Sequence[TurnSample] = ()) -> GroupSummary:
    """Of a group and what is trained of it. ``probe_tokens`` is the most that a probe may hold: an engine scores what
    leaves it room for one token more."""
    turns = [node.turn for node in group.nodes]
    spans = [(turn.generation.spans[0].version, turn.generation.spans[-1].version) for turn in turns]
    children: defaultdict[int | None, list[tuple[int, int]]] = defaultdict(list)
    for node, span in zip(group.nodes, spans, strict=True):
        children[node.parent].append(span)
    siblings = [some for parent, some in children.items() if parent is not None and len(some) > 1]
    prompt, response = (turns[0].prompt_ids, turns[0].generation.token_ids) if turns else ((), ())
    cuts = Counter(one.rule for turn in turns if (one := turn.generation.signals) and one.rule)
    return GroupSummary(
        leaves=len(group.leaves),
        successes=sum(leaf.success for leaf in group.leaves),
        turns=len(turns),
        valid_turns=sum(turn.parsed.valid for turn in turns),
        exploring_turns=sum(turn.parsed.explores for turn in turns),
        branched_turns=len(siblings),
        leaf_turns=sum(len(group.path(leaf)) for leaf in group.leaves),
        tokens=sum(len(turn.generation.token_ids) for turn in turns),
        prompt_tokens=sum(len(turn.prompt_ids) for turn in turns),
        seconds=group.seconds,
        spans=dict(Counter(spans)),
        sibling_spreads=dict(Counter(spread(some) for some in siblings)),
        counters=dict(group.counters) | {f"cut_{rule}": count for rule, count in cuts.items()},
        probe=Probe((prompt + response)[:probe_tokens], len(prompt)),
        trained_tokens=sum(sample.copies * sum(sample.loss_mask) for sample in samples),
        digest=token_digest([id for turn in turns for id in turn.generation.token_ids]),
        thinking=_thinking(group),
    )


def _thinking(group: Group) -> dict[str, list[float]]:
    found: defaultdict[str, list[float]] = defaultdict(list)
    by_id = {node.id: node.turn.generation for node in group.nodes}
    for node in group.nodes:
        generation = node.turn.generation
        if (signals := generation.signals) is None:
            continue
        found["phi"].append(signals.phi)
        found["tokens"].append(signals.thinking_tokens)
        before = None if node.parent is None else by_id[node.parent]
        if before is not None and before.signals is not None:
            mixed = {span.version for one in (before, generation) for span in one.spans}
            name = "gamma_mixed" if len(mixed) > 1 else "gamma"
            found[name].append(signals.gamma(before.signals))
    return dict(found)
