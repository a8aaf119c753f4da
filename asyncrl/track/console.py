"""Live progress on a terminal, plain lines everywhere else.

On a terminal a bar of versions and the last values stay at the bottom while other output scrolls above them; in a file
or a pipe each record is one line of ``name=value``.
"""

from collections.abc import Sequence

from rich import get_console
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from asyncrl.track.base import Histograms, Metrics

COLUMNS = 4
"""Values side by side in the live table."""


class ConsoleSink:
    def __init__(
        self, total: int, headline: Sequence[str] = (), console: Console | None = None, version: int = 0
    ) -> None:
        """The bar goes from ``version`` to ``total``; ``headline`` names the metrics to show, in order (none: all)."""
        self._console = console or get_console()
        self._total, self._headline = total, tuple(headline)
        self._shown: dict[str, float] = {}
        columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=self._console)
        self._version = self._progress.add_task("version", total=total, completed=version)
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(self._render(), console=self._console, refresh_per_second=4)
            self._live.start()

    def log(self, step: int, version: int, metrics: Metrics, histograms: Histograms) -> None:
        names = self._headline or tuple(metrics)
        shown = {name: float(metrics[name]) for name in names if name in metrics}
        self._shown |= shown
        if self._live is not None:
            self._progress.update(self._version, completed=version)
            self._live.update(self._render())
        elif shown:
            line = "  ".join([f"version {version} of {self._total}", *(f"{n}={v:.4g}" for n, v in shown.items())])
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _render(self) -> Group:
        table = Table.grid(padding=(0, 3))
        cells = [f"{name} [bold]{value:.4g}[/bold]" for name, value in self._shown.items()]
        for start in range(0, len(cells), COLUMNS):
            table.add_row(*cells[start : start + COLUMNS])
        return Group(self._progress, table)
