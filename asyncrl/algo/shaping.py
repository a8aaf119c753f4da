"""What is added to the task's reward of a group's leaves.

Invariant: leaves that differ in nothing get the same, and where the whole group does, nothing.
"""

import numpy as np
from numpy.typing import NDArray


def length_reward(lengths: NDArray[np.int64], success: NDArray[np.bool_]) -> NDArray[np.float64]:
    """(L,) in [-0.5, 0.5], for being shorter than the others: 0.5 - (length - shortest) / (longest - shortest) for a
    success, the same but never above 0 for a failure; 0 where all are equally long.

    Args:
        lengths: (L,) generated tokens of each leaf's whole path.
        success: (L,).

    Kimi k1.5, arXiv 2501.12599, section 2.3.3.
    """
    spread = np.ptp(lengths) if len(lengths) else 0
    if not spread:
        return np.zeros(len(lengths))
    ahead = 0.5 - (lengths - lengths.min()) / spread
    return np.where(success, ahead, np.minimum(ahead, 0.0))
