"""table.md, table.tex and classes.csv of an evaluation of rows."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from typing import Any

from segcal.evaluation.tables import DASH, best_pipelines, cell, markdown_text, tex_text

HEADLINE = ("accuracy", "nll", "brier", "ece", "adaptive_ece", "classwise_ece", "flip")
TITLES = {
    "accuracy": "Accuracy (%) ↑",
    "nll": "NLL ↓",
    "brier": "Brier ↓",
    "ece": "ECE ↓",
    "adaptive_ece": "Adaptive ECE ↓",
    "classwise_ece": "Class-wise ECE ↓",
    "flip": "Changed (%) ↓",
}


def markdown_table(summary: Mapping[str, Any]) -> str:
    """The headline table with intervals; the best value of each column is bold."""
    best = {column: best_pipelines(summary["pipelines"], column) for column in HEADLINE}
    lines = [_caption(summary), "", "| Pipeline | " + " | ".join(TITLES[c] for c in HEADLINE) + " |"]
    lines.append("|---|" + "---|" * len(HEADLINE))
    for pipeline in summary["pipelines"]:
        texts = [(cell(pipeline, column), pipeline["name"] in best[column]) for column in HEADLINE]
        cells = [f"**{text}**" if bold else text for text, bold in texts]
        lines.append(f"| {markdown_text(pipeline['name'])} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def latex_table(summary: Mapping[str, Any]) -> str:
    """The same as a LaTeX tabular (booktabs)."""
    best = {column: best_pipelines(summary["pipelines"], column) for column in HEADLINE}
    titles = [tex_text(TITLES[c]).replace("↓", r"$\downarrow$").replace("↑", r"$\uparrow$") for c in HEADLINE]
    lines = [f"% {_caption(summary)}", r"\begin{tabular}{l" + "r" * len(HEADLINE) + "}", r"\toprule"]
    lines += [" & ".join(["Pipeline", *titles]) + r" \\", r"\midrule"]
    for pipeline in summary["pipelines"]:
        texts = [(tex_text(cell(pipeline, c)).replace(DASH, "---"), pipeline["name"] in best[c]) for c in HEADLINE]
        cells = [rf"\textbf{{{text}}}" if bold else text for text, bold in texts]
        lines.append(" & ".join([tex_text(pipeline["name"]), *cells]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def class_csv(summary: Mapping[str, Any]) -> str:
    """One line a pipeline and class."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["pipeline", "class", "n_labelled", "n_predicted", "mean_probability", "ece"])
    for pipeline in summary["pipelines"]:
        for one in pipeline["classes"]:
            numbers = [one[key] for key in ("n_labelled", "n_predicted", "mean_probability", "ece")]
            writer.writerow([pipeline["name"], one["name"], *numbers])
    return text.getvalue()


def resampled_words(summary: Mapping[str, Any]) -> str:
    """What the intervals were drawn over, in words."""
    drawn = summary["resampled"]
    words = f"{drawn['n']:,} {drawn['what']}"
    return words if drawn["n"] == drawn["n_units"] else f"{words} in {drawn['n_units']:,} random blocks"


def _caption(summary: Mapping[str, Any]) -> str:
    level = f"{100 * summary['settings']['bootstrap']['confidence_level']:g} %"
    return (
        f"{summary['n_rows']:,} rows of {len(summary['classes'])} classes, {summary['settings']['metrics']['n_bins']} "
        f"bins; value [{level} interval of a bootstrap over {resampled_words(summary)}, "
        f"{summary['n_bootstrap']} replicates]."
    )
