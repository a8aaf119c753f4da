"""The forest of one task as a synchronous state machine; coroutines drive it, one owner at a time.

Invariants, after every call:

* Leaf budget (SPARK, Eq. 7 with finished leaves counted): reserved + active + finished + lost <= N. A branch makes
  ``min(B - 1, N - leaves so far)`` children and reserves their slots at once, so a child that still waits for its
  environment is already paid for.
* A slot comes back only when a child fails before its first turn (``release``). A leaf lost later keeps its slot:
  its turns were played.
* A branch happens at the last node of an active leaf, after that node's action was executed, at most once a node and
  never where the episode ended.
* A leaf is in the group only if it finished; a node only if it lies on the path to such a leaf.

A call that would break one of these, or comes at a time when it makes no sense (a group while leaves are still to end),
raises :class:`ForestError` and changes nothing.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from random import Random
from typing import TypeAlias

from asyncrl.config.tree import TreeConfig
from asyncrl.types import Group, LeafRecord, Node, Task, Turn

LeafId: TypeAlias = int
"""Unique within a forest; roots are 0..M-1, children follow in the order of their branches."""


class ForestError(RuntimeError):
    """A transition that the forest's rules forbid: a mistake of the caller, not of the model or the environment."""


class LeafState(Enum):
    RESERVED = "reserved"
    """A child that has not completed its first turn."""
    ACTIVE = "active"
    FINISHED = "finished"
    RELEASED = "released"
    """A child that failed before its first turn; it holds no slot."""
    LOST = "lost"
    """Ended by infrastructure; it holds its slot but is not in the group."""


@dataclass(slots=True)
class _Leaf:
    id: LeafId
    tree: int
    state: LeafState
    last: Node | None
    """Last node of its path, for a reserved child the fork; None for a root without a turn."""
    served: Node | None = None
    """Last node at which its trigger was served or denied."""
    success: bool = False


class Forest:
    """M trees of one task attempt under one leaf budget.

    Args:
        key: admission number of the task attempt.
        rng: draws the order of simultaneous triggers.
    """

    def __init__(self, task: Task, key: int, cfg: TreeConfig, rng: Random) -> None:
        self.task, self.key, self.cfg = task, key, cfg
        self.counters: Counter[str] = Counter(
            dict.fromkeys(("triggers", "branches", "children", "denied", "curtailed", "discarded", "lost"), 0)
        )
        self._rng = rng
        self._nodes: list[Node] = []
        self._leaves = [_Leaf(i, i, LeafState.ACTIVE, None) for i in range(cfg.roots)]

    def state(self, leaf_id: LeafId) -> LeafState:
        return self._leaf(leaf_id).state

    def live(self) -> list[LeafId]:
        """Leaves that are still to end: reserved and active ones; at the start the M roots."""
        return [leaf.id for leaf in self._leaves if leaf.state in (LeafState.RESERVED, LeafState.ACTIVE)]

    @property
    def used(self) -> int:
        """Slots of the budget that are taken: every leaf so far except released ones."""
        return sum(leaf.state is not LeafState.RELEASED for leaf in self._leaves)

    def path(self, leaf_id: LeafId) -> list[Node]:
        """Nodes from the root to the leaf's last turn; a child's path begins with its parent's, up to the fork."""
        at, path = self._leaf(leaf_id).last, []
        while at is not None:
            path.append(at)
            at = None if at.parent is None else self._nodes[at.parent]
        return path[::-1]

    def extend(self, leaf_id: LeafId, turn: Turn) -> Node:
        """Append a completed turn; a reserved child becomes active with it."""
        leaf = self._leaf(leaf_id)
        if leaf.state not in (LeafState.RESERVED, LeafState.ACTIVE):
            raise self._error(leaf, "cannot take another turn: it has ended")
        self._refuse_ended_episode(leaf, "take another turn")
        parent, depth = (None, 0) if leaf.last is None else (leaf.last.id, leaf.last.depth + 1)
        node = Node(len(self._nodes), parent, depth, leaf.tree, turn)
        self._nodes.append(node)
        leaf.last, leaf.state = node, LeafState.ACTIVE
        return node

    def serve(self, triggers: Sequence[LeafId]) -> dict[LeafId, tuple[LeafId, ...]]:
        """Serve triggers that arrived at the same time, in random order, while the budget lasts.

        Finish leaves that reached a turn limit first: a finished leaf cannot branch. Triggers that arrived at
        different times are served by one call each. Every trigger is counted; one that gets no child is ``denied``
        (also by depth, ``denied_depth_<d>``), one that gets fewer than B - 1 is ``curtailed``.

        Returns parent -> children, in the order served, where there are any. Children start from the state right after
        the parent's last action and share its path.
        """
        if len(set(triggers)) != len(triggers):
            raise ForestError(f"{self._name}: a leaf is twice among the triggers {list(triggers)}")
        leaves = [self._leaf(leaf_id) for leaf_id in triggers]
        for leaf in leaves:
            node = self._last(leaf, "branch")
            self._refuse_ended_episode(leaf, "branch")
            if leaf.served is node:
                raise self._error(leaf, f"was already served at node {node.id}")
        self._rng.shuffle(leaves)
        branches = {leaf.id: self._branch(leaf) for leaf in leaves}
        return {parent: children for parent, children in branches.items() if children}

    def finish(self, leaf_id: LeafId, success: bool) -> None:
        """End an active leaf at its last turn, by a turn limit if that did not end the episode; it is in the group."""
        leaf = self._leaf(leaf_id)
        self._last(leaf, "finish")
        leaf.state, leaf.success = LeafState.FINISHED, success

    def release(self, leaf_id: LeafId, cause: str) -> None:
        """Discard a child that failed before its first turn and give its slot back.

        ``cause``: a short name such as ``replay_mismatch``; counted as ``discarded_<cause>``.
        """
        leaf = self._leaf(leaf_id)
        if leaf.state is not LeafState.RESERVED:
            raise self._error(leaf, "cannot be released: only a child before its first turn can; lose() it")
        self._count("discarded", cause)
        leaf.state = LeafState.RELEASED

    def lose(self, leaf_id: LeafId, cause: str) -> None:
        """Take a leaf that infrastructure ended out of the group; it never becomes a zero-reward leaf.

        A child that is lost before its first turn is released instead: nothing of it was played.

        ``cause`` as in ``release``; counted as ``lost_<cause>``.
        """
        leaf = self._leaf(leaf_id)
        if leaf.state is LeafState.RESERVED:
            self.release(leaf_id, cause)
            return
        if leaf.state is not LeafState.ACTIVE:
            raise self._error(leaf, "cannot be lost: it has ended")
        self._count("lost", cause)
        leaf.state = LeafState.LOST

    def group(self, seconds: float = 0.0) -> Group:
        """The completed forest: finished leaves, and the nodes on their paths in order of creation.

        ``leaves`` may be fewer than M, or empty, only when leaves were lost (``counters["lost"]``).
        """
        if live := self.live():
            raise ForestError(f"{self._name}: leaves {live} are still to end; no group yet")
        records: list[LeafRecord] = []
        kept: set[int] = set()
        for leaf in self._leaves:
            if leaf.state is LeafState.FINISHED:
                path = self.path(leaf.id)
                kept.update(node.id for node in path)
                reward, last = sum(node.turn.reward for node in path), path[-1].turn
                end = "terminated" if last.terminated else "truncated" if last.truncated else "turn_limit"
                records.append(LeafRecord(leaf.id, leaf.tree, path[-1].id, reward, leaf.success, end))
        nodes = [node for node in self._nodes if node.id in kept]
        counters = {**self.counters, "turns_dropped": len(self._nodes) - len(nodes)}
        return Group(self.key, self.task, nodes, records, counters, seconds)

    def _branch(self, leaf: _Leaf) -> tuple[LeafId, ...]:
        leaf.served = node = self._last(leaf, "branch")
        wanted = self.cfg.branch - 1
        granted = min(wanted, self.cfg.leaves - self.used)
        children = tuple(range(len(self._leaves), len(self._leaves) + granted))
        self._leaves += [_Leaf(i, leaf.tree, LeafState.RESERVED, node) for i in children]
        self.counters["triggers"] += 1
        if granted:
            self.counters["branches"] += 1
            self.counters["children"] += granted
            self.counters["curtailed"] += granted < wanted
        elif wanted:
            self.counters["denied"] += 1
            self.counters[f"denied_depth_{node.depth}"] += 1
        return children

    def _last(self, leaf: _Leaf, what: str) -> Node:
        """The last node of an active leaf that is to do ``what``."""
        if leaf.state is not LeafState.ACTIVE:
            raise self._error(leaf, f"cannot {what}: only an active leaf can")
        if leaf.last is None:
            raise self._error(leaf, f"cannot {what} before its first turn")
        return leaf.last

    def _refuse_ended_episode(self, leaf: _Leaf, what: str) -> None:
        if leaf.last is not None and (leaf.last.turn.terminated or leaf.last.turn.truncated):
            raise self._error(leaf, f"cannot {what}: its episode ended at node {leaf.last.id}; finish() it")

    def _count(self, what: str, cause: str) -> None:
        if not re.fullmatch(r"\w+", cause):
            raise ForestError(f"{self._name}: cause {cause!r} must be one word such as 'replay_mismatch'")
        self.counters[what] += 1
        self.counters[f"{what}_{cause}"] += 1

    def _leaf(self, leaf_id: LeafId) -> _Leaf:
        if not 0 <= leaf_id < len(self._leaves):
            raise ForestError(f"{self._name}: no leaf {leaf_id}; ids run from 0 to {len(self._leaves) - 1}")
        return self._leaves[leaf_id]

    def _error(self, leaf: _Leaf, what: str) -> ForestError:
        return ForestError(f"{self._name}: leaf {leaf.id} ({leaf.state.value}) {what}")

    @property
    def _name(self) -> str:
        return f"forest {self.key} of {self.task.env} task {self.task.id}"
