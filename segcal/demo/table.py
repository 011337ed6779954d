"""The before/after table of the demo, for the terminal, Markdown and the page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from segcal.demo.scores import BEFORE, DemoScores
from segcal.fitted import FittedCalibrator


@dataclass(frozen=True, slots=True)
class Column:
    """One number of the table: where it is found, how it is written, and which way it gets better."""

    key: str
    heading: str
    factor: float
    decimals: int
    lower_is_better: bool | None

    def text(self, value: float) -> str:
        """The number as the table shows it; a dash where it does not exist."""
        return f"{self.factor * value:.{self.decimals}f}" if math.isfinite(value) else "-"


COLUMNS = (
    Column("nll", "NLL", 1.0, 4, True),
    Column("ece", "ECE %", 100.0, 2, True),
    Column("dsc", "DSC %", 100.0, 2, False),
    Column("flip", "flips %", 100.0, 2, None),
)


@dataclass(frozen=True, slots=True)
class Cell:
    """A number as text, and whether it is the best of its column."""

    text: str
    best: bool


@dataclass(frozen=True, slots=True)
class Row:
    """One pipeline.

    Attributes:
        ignores_offsets: Whether shifting all logits of a voxel changes nothing (translation invariance).
        keeps_classes: Whether the segmentation stays as it is, by construction.
        cells: Numbers by site, in the order of `COLUMNS`.
    """

    name: str
    ignores_offsets: bool
    keeps_classes: bool
    cells: Mapping[str, tuple[Cell, ...]]


def table_rows(scores: DemoScores, fitted: Mapping[str, FittedCalibrator]) -> list[Row]:
    """One row for the pooled ensemble and one for each method, in the order they were fitted."""
    best = {(group, column.key): _best(scores, group, column) for group in scores.groups for column in COLUMNS}
    rows = []
    for name in scores.pipelines:
        cells = {}
        for group in scores.groups:
            texts = [(column, column.text(scores.mean(name, group, column.key))) for column in COLUMNS]
            cells[group] = tuple(Cell(text, text == best[group, column.key]) for column, text in texts)
        info = None if name == BEFORE else fitted[name].info
        rows.append(Row(name, info is None or info.translation_invariant, info is None or bool(info.preserves), cells))
    return rows


def _best(scores: DemoScores, group: str, column: Column) -> str | None:
    """The best number of a column as text, so that numbers the reader sees as equal are marked alike."""
    if column.lower_is_better is None:
        return None
    values = [value for name in scores.pipelines if math.isfinite(value := scores.mean(name, group, column.key))]
    return column.text(min(values) if column.lower_is_better else max(values)) if values else None


def table_header(groups: Sequence[str]) -> list[str]:
    """Headings of the plain table: method, properties, then every number for every site."""
    return ["method", "TI", "keeps", *(f"{column.heading} {group}" for column in COLUMNS for group in groups)]


def table_cells(row: Row) -> list[str]:
    """The row under `table_header`."""
    numbers = [cells[index].text for index in range(len(COLUMNS)) for cells in row.cells.values()]
    return [row.name, "yes" if row.ignores_offsets else "no", "yes" if row.keeps_classes else "no", *numbers]


def markdown_table(rows: Sequence[Row], groups: Sequence[str]) -> str:
    """The table in Markdown, best numbers in bold, with a line that explains the columns."""
    header = table_header(groups)
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * 3}{'---:|' * (len(header) - 3)}"]
    for row in rows:
        numbers = [cells[index] for index in range(len(COLUMNS)) for cells in row.cells.values()]
        shown = [f"**{cell.text}**" if cell.best else cell.text for cell in numbers]
        lines.append(f"| {' | '.join([*table_cells(row)[:3], *shown])} |")
    note = (
        "Means over the test cases. TI: shifting all logits of a voxel changes nothing. keeps: the segmentation stays "
        "as it is. NLL: negative log-likelihood in nats. ECE: expected calibration error, 50 bins. DSC: mean Dice of "
        "the foreground classes. flips: voxels whose class changes."
    )
    return "\n".join([*lines, "", note, ""])
