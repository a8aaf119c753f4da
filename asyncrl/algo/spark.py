"""SPARK's tree advantage (arXiv 2601.20209, tree-based policy update), which over chains is GRPO's (arXiv 2402.03300,
section 4.1) as the releases for agents compute it::

    s[leaf, turn] = R(leaf) - penalty * [turn not in order]
    A[leaf, turn] = (s - mean) / (std + 1e-6)         std unbiased; a population of one: mean 0, std 1
"""

from asyncrl.algo.paths import Credit, Floats, Paths, Scored, standardise
from asyncrl.config.algo import AlgoConfig


def spark(paths: Paths, algo: AlgoConfig) -> Credit:
    """Credit with the choices of ``algo``: ``statistics``, ``normalise``, ``prefix``."""
    rows = Scored.of(paths, algo)
    return rows.credit(of_group(paths, rows, algo), len(paths.parent))


def of_group(paths: Paths, rows: Scored, algo: AlgoConfig) -> Floats:
    """A of each row."""
    score = rows.value - rows.penalty
    population = score if algo.statistics == "steps" else paths.returns
    return standardise(score, population, divide=algo.normalise == "mean_std")
