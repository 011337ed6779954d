"""table.md, table.tex and differences.csv: the summary as people paste it."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from segcal.counted import count
from segcal.evaluation.summary import HEADLINE

TITLES = {
    "nll": "NLL ↓",
    "dsc": "DSC (%) ↑",
    "ece": "ECE ↓",
    "ba_ece": "BA-ECE ↓",
    "ace": "ACE ↓",
    "flip": "Flip (%) ↓",
}
PERCENT = ("dsc", "accuracy", "flip")
HIGHER = ("dsc", "accuracy")
DASH = "—"
_TEX = str.maketrans(
    {sign: rf"\{sign}" for sign in "_%&#${}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
)


def markdown_table(summary: Mapping[str, Any]) -> str:
    """The headline table with intervals; the best mean of each column is bold."""
    lines = [caption(summary), ""]
    lines += _markdown(summary["pipelines"])
    for group, pipelines in summary["groups"].items():
        lines += ["", f"Group {group}:", "", *_markdown(pipelines)]
    return "\n".join(lines) + "\n"


def latex_table(summary: Mapping[str, Any]) -> str:
    """The same as a LaTeX tabular (booktabs)."""
    best = _best(summary["pipelines"])
    titles = [tex_text(TITLES[c]).replace("↓", r"$\downarrow$").replace("↑", r"$\uparrow$") for c in HEADLINE]
    lines = [f"% {caption(summary)}", r"\begin{tabular}{l" + "r" * len(HEADLINE) + "}", r"\toprule"]
    lines += [" & ".join(["Pipeline", *titles]) + r" \\", r"\midrule"]
    for pipeline in summary["pipelines"]:
        cells = []
        for column in HEADLINE:
            text = tex_text(cell(pipeline, column)).replace(DASH, "---")
            cells.append(rf"\textbf{{{text}}}" if pipeline["name"] in best[column] else text)
        lines.append(" & ".join([tex_text(pipeline["name"]), *cells]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def caption(summary: Mapping[str, Any]) -> str:
    """What the numbers and brackets of the headline table are; ACE has other brackets than the rest."""
    level = f"{100 * summary['settings']['bootstrap']['confidence_level']:g} %"
    ace = "mean [smallest, largest repeat]" if summary["n_repeats"] > 1 else "all cases pooled, without brackets"
    return (
        f"{count(summary['n_cases'], 'case')}, {count(summary['n_repeats'], 'repeat')}; mean [{level} interval of the "
        f"two-level bootstrap, {count(summary['n_bootstrap'], 'replicate')}]; ACE: {ace}."
    )


def differences_csv(summary: Mapping[str, Any]) -> str:
    """Paired differences, one row each."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    header = ("first", "second", "metric", "difference", "low", "high", "by_subject_low", "by_subject_high")
    writer.writerow([*header, "share_improved", "share_worsened", "n_pairs"])
    for row in summary["differences"]:
        subject = row.get("by_subject") or {}  # rows of a classifier have one interval only
        numbers = [row["difference"], row["low"], row["high"], subject.get("low"), subject.get("high")]
        tail = [row["share_improved"], row["share_worsened"], row["n_pairs"]]
        writer.writerow(
            [row["first"], row["second"], row["metric"], *("" if n is None else n for n in [*numbers, *tail])]
        )
    return text.getvalue()


def cell(pipeline: Mapping[str, Any], column: str) -> str:
    """`0.0375 [0.0331, 0.0422]`, percent for shares, a dash where the number does not apply or does not exist."""
    if column == "flip" and not pipeline["flip_applicable"]:
        return DASH
    values = pipeline["metrics"][column]
    if values["mean"] is None:
        return DASH
    mean, low, high = (_shown(values[key], column) for key in ("mean", "low", "high"))
    if column == "ace" and len(values["by_repeat"]) == 1:
        return mean  # its range over one repeat would look like an interval of width 0
    return f"{mean} [{low}, {high}]"


def best_pipelines(pipelines: Sequence[Mapping[str, Any]], column: str) -> frozenset[str]:
    """Names of the pipelines with the best mean of a column; none for flips, where fewer is not better than none."""
    known = {p["name"]: p["metrics"][column]["mean"] for p in pipelines if cell(p, column) != DASH}
    if not known or column == "flip":
        return frozenset()
    best = max(known.values()) if column in HIGHER else min(known.values())
    return frozenset(name for name, mean in known.items() if mean == best)


def _best(pipelines: Sequence[Mapping[str, Any]]) -> dict[str, frozenset[str]]:
    return {column: best_pipelines(pipelines, column) for column in HEADLINE}


def _markdown(pipelines: Sequence[Mapping[str, Any]]) -> list[str]:
    best = _best(pipelines)
    lines = ["| Pipeline | " + " | ".join(TITLES[c] for c in HEADLINE) + " |", "|---|" + "---|" * len(HEADLINE)]
    for pipeline in pipelines:
        cells = [cell(pipeline, column) for column in HEADLINE]
        cells = [f"**{c}**" if pipeline["name"] in best[k] else c for k, c in zip(HEADLINE, cells, strict=True)]
        lines.append(f"| {markdown_text(pipeline['name'])} | " + " | ".join(cells) + " |")
    return lines


def _shown(value: float | None, column: str) -> str:
    if value is None:
        return DASH
    return f"{100 * value:.2f}" if column in PERCENT else f"{value:.4f}"


def markdown_text(text: str) -> str:
    """Text that stays in its cell of a table."""
    return text.replace("|", r"\|")


def tex_text(text: str) -> str:
    """Text with what LaTeX would take for commands escaped."""
    return text.translate(_TEX)
