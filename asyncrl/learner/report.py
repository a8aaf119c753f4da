"""What a rank counts during an update, and the figures the ranks' counts come to.

Invariants: ranks return sums and maxima only, so merged means are those of all rows wherever they lay; gradient norm,
learning rate and the number of optimizer steps are the same on every rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from asyncrl.algo.loss import LossSum


@dataclass(slots=True)
class RankReport:
    """One rank's share of one or more optimizer steps."""

    weight: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    unseen: float = 0.0
    """Weight of the turns that the model did not see, whose loss is 0."""
    rows: int = 0
    tokens: int = 0
    micro_batches: int = 0
    digests_checked: int = 0
    """Rows whose response, as it lay in the packed tensor, was compared with the generator's digest."""
    digest_mismatches: int = 0
    updates: int = 0
    """Optimizer steps."""
    grad_norm: float = 0.0
    """Before clipping, summed over the steps."""
    lr: float = 0.0

    def add(self, part: LossSum) -> None:
        self.weight += part.weight
        for name, value in {**part.sums, "loss": float(part.total.detach())}.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        for name, value in part.maxima.items():
            self.maxima[name] = max(self.maxima.get(name, value), value)


def merge(reports: Sequence[RankReport]) -> dict[str, float]:
    """One update's figures from all ranks' reports, in rank order.

    Means over the tokens that the model saw, once a copy (``entropy``, ...), but ``loss`` and ``policy_loss`` over the
    others too; ``ess`` (effective sample size of the seen tokens' importance, as a share: (sum w)^2 / (n sum w^2),
    arXiv 1809.04129), maxima (``ratio_max``), ``grad_norm`` (mean over the steps), ``lr``, ``updates`` (optimizer steps
    of this call), ``rows`` and ``tokens`` that the model saw, ``trained_tokens`` (of them, once a copy),
    ``micro_batches``, ``digests_checked`` and ``digest_mismatches``.
    """
    first = reports[0]
    weight = sum(report.weight for report in reports)
    figures = {
        name: sum(report.sums.get(name, 0.0) for report in reports) / weight
        for name in sorted({name for report in reports for name in report.sums})
        if weight
    }
    for name in {"loss", "policy_loss"} & figures.keys():
        figures[name] *= weight / (weight + sum(report.unseen for report in reports))
    if "importance" in figures:
        mean, square = figures.pop("importance"), figures.pop("importance_sq")
        figures["ess"] = mean**2 / square if square else 0.0
    for name in sorted({name for report in reports for name in report.maxima}):
        figures[name] = max(report.maxima[name] for report in reports if name in report.maxima)
    for name in ("rows", "tokens", "micro_batches", "digests_checked", "digest_mismatches"):
        figures[name] = float(sum(getattr(report, name) for report in reports))
    return figures | {
        "grad_norm": first.grad_norm / max(1, first.updates),
        "lr": first.lr,
        "updates": float(first.updates),
        "trained_tokens": weight,
    }
