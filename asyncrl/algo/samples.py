"""From a completed group to the rows a learner trains on.

Invariants: each node becomes exactly one turn sample; its response ids are the engine's own, unchanged; ids, log-probs
and mask have one length, and the version spans cover it without gaps.
"""

import math

import numpy as np

from asyncrl.algo.advantage import ADVANTAGES
from asyncrl.algo.paths import Paths
from asyncrl.algo.shaping import length_reward
from asyncrl.config.algo import AlgoConfig
from asyncrl.types import Group, Node, Turn, TurnSample


def turn_samples(group: Group, cfg: AlgoConfig) -> list[TurnSample]:
    """One turn sample for each node of ``group``, in its order, with the credit of ``cfg``; none of an empty group.

    Raises ValueError: a node lies under no leaf, or a turn's ids, log-probs and spans do not line up.
    """
    where = f"group {group.key} ({group.task.env} task {group.task.id})"
    if not group.nodes:
        return []
    for node in group.nodes:
        _check_generation(node, where)
    try:
        credit = ADVANTAGES[cfg.advantage](group_paths(group, cfg), cfg)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return [
        TurnSample(
            prompt_ids=node.turn.prompt_ids,
            response_ids=node.turn.generation.token_ids,
            loss_mask=tuple(at not in node.turn.generation.forced for at in range(len(node.turn.generation.token_ids))),
            logprobs=node.turn.generation.logprobs,
            advantage_pos=float(credit.positive[i]),
            advantage_neg=float(credit.negative[i]),
            copies=int(credit.copies[i]),
            spans=node.turn.generation.spans,
            group=group.key,
            node=node.id,
            digest=node.turn.generation.digest,
        )
        for i, node in enumerate(group.nodes)
    ]


def group_paths(group: Group, cfg: AlgoConfig) -> Paths:
    """The group as arrays, in the order of ``group.nodes``; a leaf returns ``success_reward`` or 0, and what shaping
    adds."""
    index = {node.id: i for i, node in enumerate(group.nodes)}
    paths = [[node.turn for node in group.path(leaf)] for leaf in group.leaves]
    success = np.array([leaf.success for leaf in group.leaves], dtype=np.bool_)
    lengths = np.array([sum(len(turn.generation.token_ids) for turn in path) for path in paths])
    void = np.array([any(turn.parsed.void for turn in path) for path in paths], dtype=np.bool_)
    return Paths(
        parent=np.array([-1 if n.parent is None else index[n.parent] for n in group.nodes], dtype=np.int64),
        end=np.array([index[leaf.node] for leaf in group.leaves], dtype=np.int64),
        returns=cfg.success_reward * success + cfg.length_reward * length_reward(lengths, success),
        in_order=np.array([_in_order(node.turn, cfg) for node in group.nodes], dtype=np.bool_),
        trained=~(void & cfg.void_filter),
        anchors=[node.turn.observation.anchor or node.turn.observation.text for node in group.nodes],
    )


def _in_order(turn: Turn, cfg: AlgoConfig) -> bool:
    """``valid`` compares actions in lower case, as T2PO's release does in ALFWorld."""
    listed = turn.observation.actions if cfg.penalty_on == "valid" else None
    admissible = listed is None or turn.parsed.action.lower() in map(str.lower, listed)
    return turn.parsed.valid and admissible


def _check_generation(node: Node, where: str) -> None:
    generation, at = node.turn.generation, f"{where}, node {node.id}"
    n = len(generation.token_ids)
    if not node.turn.prompt_ids or not n:
        raise ValueError(f"{at}: needs prompt and response ids, got {len(node.turn.prompt_ids)} and {n}")
    if len(generation.logprobs) != n:
        raise ValueError(f"{at}: {n} response ids but {len(generation.logprobs)} log-probs; they must line up")
    if not all(math.isfinite(logprob) for logprob in generation.logprobs):
        raise ValueError(f"{at}: a behaviour log-prob is not finite")
    starts, ends = [span.start for span in generation.spans], [span.end for span in generation.spans]
    versions = [span.version for span in generation.spans]
    if [0, *ends] != [*starts, n] or versions != sorted(versions):
        raise ValueError(
            f"{at}: version spans {[tuple(s) for s in generation.spans]} must cover 0..{n} in order, without gaps and "
            "with versions that never decrease"
        )
