"""report.html of an evaluation of rows: made from its folder alone, in the look of the segmentation report."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segcal.classification.diagrams import class_diagrams, overall_diagram, single_diagrams, stated_rows
from segcal.classification.intervals import COMPARED
from segcal.classification.metrics import LOCAL_METRICS, METRICS, OOD_METRICS
from segcal.classification.tables import HEADLINE, TITLES, resampled_words
from segcal.classification.verdicts import row_verdicts
from segcal.counted import count
from segcal.errors import FileFormatError, MissingFileError
from segcal.io.archive import read_npz_array
from segcal.report.cautions import FEW_SUBJECTS, Caution
from segcal.report.comparisons import Compared
from segcal.report.render import render
from segcal.report.result_tables import difference_rows, result_rows
from segcal.report.roles import Roles, assign_roles
from segcal.report.verdict import overview
from segcal.report.wording import DASH, MEASURES, listing, number

SHOWN_CLASSES = 30
EVERY = {**METRICS, **OOD_METRICS, **LOCAL_METRICS}
OTHERS = tuple(name for name in EVERY if name not in HEADLINE)


@dataclass(frozen=True, slots=True, eq=False)
class RowResults:
    """What a page is made of: summary.json and the bin tables, each (pipeline, ...)."""

    name: str
    summary: Mapping[str, Any]
    top_label: NDArray[np.float64]
    classwise: NDArray[np.float64]
    digests: Mapping[str, str]

    def find(self, first: str, second: str, column: str) -> Compared | None:
        """The paired difference as the summary has it; rows have one interval, which stands for both schemes."""
        for entry in self.summary["differences"]:
            if (entry["first"], entry["second"], entry["metric"]) == (first, second, column):
                both = {**entry, "by_subject": {"low": entry["low"], "high": entry["high"]}}
                return Compared.from_entry(both, int(self.summary["resampled"]["n"]))
        return None


def load_row_results(folder: Path, summary: Mapping[str, Any]) -> RowResults:
    """Read the bin tables beside a summary.

    Raises:
        MissingFileError: bins.npz is not there.
        FileFormatError: it is not of the same run.
    """
    path = folder / "bins.npz"
    if not path.is_file():
        raise MissingFileError(f"{path}: not there, but summary.json is; evaluate again into a new folder")
    top_label, classwise = (read_npz_array(path, name) for name in ("top_label", "classwise"))
    expected = (len(summary["pipelines"]), len(summary["classes"]))
    if classwise.shape[:2] != expected or len(top_label) != expected[0]:
        raise FileFormatError(f"{path}: its tables are not of the run of summary.json; evaluate again")
    names = ("summary.json", "bins.npz")
    digests = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}
    return RowResults(summary["data"]["name"], summary, top_label, classwise, digests)


def row_page(folder: Path) -> str:
    """The text of the page of a folder that `segcal classify evaluate` wrote; the same folder gives the same text."""
    results = load_row_results(folder, json.loads((folder / "summary.json").read_text(encoding="utf-8")))
    summary = results.summary
    roles = assign_roles(summary)
    found = row_verdicts(results, roles)
    level = f"{100 * float(summary['settings']['bootstrap']['confidence_level']):g} %"
    calibrated = [p["name"] for p in roles.calibrated]
    pairs = [(a, b) for k, a in enumerate(calibrated) for b in calibrated[k + 1 :]]
    stated = roles.curves[:3]
    return render(
        "classify.html.j2",
        name=results.name,
        lead=_lead(results, roles),
        level=level,
        repeated=False,
        counted="rows better",
        overview=overview(found),
        verdicts=[v for v in found if v.name in roles.shown],
        more_verdicts=len(found) > len(roles.shown),
        cautions=_cautions(results, roles),
        facts=_facts(results),
        pipelines=_pipeline_words(roles),
        columns=[{"title": TITLES[c], "words": METRICS[c].words if c in METRICS else _CHANGED} for c in HEADLINE],
        result_rows=result_rows(roles.main, columns=HEADLINE),
        result_caption=(
            f"Values on all rows with their {level} intervals. The best of a column is bold; whiskers share one scale "
            "a column; the grey row is uncalibrated; a dash means “cannot happen” or “not measured”."
        ),
        difference_columns=[MEASURES[c].short for c in COMPARED],
        difference_rows=difference_rows(
            results, [(name, summary["pipelines"][0]["name"]) for name in calibrated], COMPARED
        ),
        pair_rows=difference_rows(results, pairs, COMPARED),
        other_columns=OTHERS,
        other_rows=_other_rows(roles),
        overall=overall_diagram(results, roles),
        singles=single_diagrams(results, roles),
        classes=class_diagrams(results, roles),
        stated=stated_rows(results, stated),
        stated_names=stated,
        class_names=roles.curves,
        class_rows=_class_rows(results, roles),
        n_classes=len(summary["classes"]),
        shown_classes=SHOWN_CLASSES,
        definitions=_definitions(summary, level),
        commands=_commands(summary),
        reproduce=_reproduce(results),
    )


_CHANGED = "share of rows whose predicted class differs from the uncalibrated one"


def _lead(results: RowResults, roles: Roles) -> str:
    summary = results.summary
    parts = [count(int(summary["n_rows"]), "labelled row"), count(len(summary["classes"]), "class", "classes")]
    if summary["data"]["n_ood"]:
        parts.append(count(int(summary["data"]["n_ood"]), "out-of-distribution row"))
    parts.append(count(len(roles.calibrated), "calibrated pipeline"))
    return " · ".join([*parts, f"segcal {summary['versions']['segcal']}"])


def _cautions(results: RowResults, roles: Roles) -> list[Caution]:
    summary = results.summary
    found = []
    carriers: dict[str, list[str]] = {}
    for pipeline in summary["pipelines"]:
        for text in pipeline["warnings"]:
            carriers.setdefault(text, []).append(pipeline["name"])
    found += [Caution("serious", "calibrator", f"{listing(names)}: {text}") for text, names in carriers.items()]
    found += [Caution("serious", "rows", text) for text in summary["warnings"]]
    drawn = summary["resampled"]
    if drawn["n"] < FEW_SUBJECTS:
        text = f"The intervals come from {drawn['n']} {drawn['what']}. Below about {FEW_SUBJECTS} they are too narrow."
        found.append(Caution("serious", "few rows", text))
    if drawn["what"] == "rows":
        text = (
            "The data names no `subject`: every row counts as independent. Several rows of one patient, scene or "
            "speaker are not, and the intervals are then too narrow."
        )
        found.append(Caution("note", "independence", text))
    if roles.calibrated:
        text = (
            "The calibrators were fitted once. The intervals say how the numbers vary with the rows measured, not how "
            "they would vary with other rows to fit on."
        )
        found.append(Caution("note", "one fit", text))
    return found


def _facts(results: RowResults) -> list[tuple[str, str]]:
    summary = results.summary
    classes = summary["classes"]
    shown = ", ".join(classes[:20]) + (f" and {len(classes) - 20} more" if len(classes) > 20 else "")
    return [
        ("kind of run", "segcal classify evaluate"),
        ("data", summary["data"]["name"]),
        ("data SHA-256", summary["data"]["sha256"]),
        ("scores are", summary["data"]["kind"]),
        ("labelled rows", f"{summary['n_rows']:,}"),
        ("out-of-distribution rows", f"{summary['data']['n_ood']:,}"),
        ("resampled", resampled_words(summary)),
        ("classes", shown),
        ("versions", ", ".join(f"{name} {text}" for name, text in sorted(summary["versions"].items()))),
    ]


def _pipeline_words(roles: Roles) -> list[dict[str, Any]]:
    keeps = {"order": "yes, and the ranking of classes", "argmax": "yes"}
    return [
        {
            "name": p["name"],
            "calibrated": p["calibrated"],
            "words": p["method"] if p["calibrated"] else "none: softmax of the scores as they are",
            "keeps": keeps.get(str(p["preserves"]), "no"),
            "invariant": "yes" if p["translation_invariant"] else "no",
        }
        for p in roles.main
    ]


def _other_rows(roles: Roles) -> list[dict[str, Any]]:
    """The further metrics, one line each, one column a pipeline."""
    rows = []
    for metric in OTHERS:
        values = [p["metrics"].get(metric) for p in roles.main]
        if any(value is not None for value in values):
            words = EVERY[metric]
            rows.append({"metric": metric, "words": words.words, "better": words.better, "cells": _cells(values)})
    return rows


def _cells(values: Sequence[Mapping[str, Any] | None]) -> list[dict[str, str]]:
    cells = []
    for value in values:
        mean = None if value is None else value["mean"]
        interval = ""
        if value is not None and value.get("low") is not None:
            interval = f"{value['low']:.4f} to {value['high']:.4f}"
        cells.append({"text": DASH if mean is None else f"{mean:.4f}", "interval": interval})
    return cells


def _class_rows(results: RowResults, roles: Roles) -> list[dict[str, Any]]:
    """Classes by their error before calibration, the worst first; at most SHOWN_CLASSES."""
    by_name = {p["name"]: p["classes"] for p in roles.main}
    first = by_name[results.summary["pipelines"][0]["name"]]
    n_rows = int(results.summary["n_rows"])
    order = sorted(range(len(first)), key=lambda c: (-first[c]["ece"], c))[:SHOWN_CLASSES]
    return [
        {
            "name": first[c]["name"],
            "n_labelled": f"{first[c]['n_labelled']:,}",
            "frequency": f"{first[c]['n_labelled'] / n_rows:.4f}",
            "cells": [
                (f"{by_name[name][c]['mean_probability']:.4f}", number(by_name[name][c]["ece"], "ece"))
                for name in roles.curves
            ],
        }
        for c in order
    ]


def _definitions(summary: Mapping[str, Any], level: str) -> list[tuple[str, str]]:
    bins = summary["settings"]["metrics"]["n_bins"]
    return [
        ("confidence", "The largest probability of a row; the class that has it is the prediction."),
        ("accuracy", "Share of rows whose prediction is the label."),
        ("NLL", "Mean over rows of −log of the probability of the label, in nats."),
        ("Brier", "Mean over rows of the squared distance between the probabilities and the truth (0 to 2)."),
        ("ECE", f"|accuracy − mean confidence| in {bins} bins of equal width, weighted by rows."),
        ("adaptive ECE", f"The same in {bins} bins of equally many rows."),
        ("class-wise ECE", "The ECE of every class's own probability against its frequency, plain mean over classes."),
        ("changed", f"The {_CHANGED}; a dash where the method cannot change it."),
        *((name, metric.words) for name, metric in EVERY.items() if name in OTHERS),
        (
            "intervals",
            f"{level}, {summary['n_bootstrap']:,} bootstrap replicates over {resampled_words(summary)}, the same for "
            "all pipelines. Percentile for means over rows, AURC and out-of-distribution metrics. Noise only raises "
            "calibration errors: their intervals, and those of differences, allow for the most that it can add. They "
            "are wide where an error is mostly noise; NLL and Brier tell pipelines apart on fewer rows. Equal-mass "
            "bins and the number of bins of the sweep stay those of all rows. MCE and ACE have none, because "
            "a bin of a few rows counts as much in them as the fullest; nor have LCE and MLCE: a row drawn twice is "
            "its own nearest neighbour, so drawn rows have other local errors than new ones.",
        ),
    ]


def _commands(summary: Mapping[str, Any]) -> list[str]:
    how = summary["settings"]["bootstrap"]
    n_calibrated = sum(1 for p in summary["pipelines"] if p["calibrated"])
    parts = ["segcal classify evaluate", *["CALIBRATOR"] * n_calibrated, summary["data"]["name"]]
    parts.append(f"--bins {summary['settings']['metrics']['n_bins']}")
    parts.append(f"--replicates {how['n_replicates']} --seed {how['seed']} --out RESULTS")
    return [" ".join(parts), "segcal report RESULTS"]


def _reproduce(results: RowResults) -> list[tuple[str, str]]:
    facts = [("seed of the intervals", str(results.summary["settings"]["bootstrap"]["seed"]))]
    for pipeline in results.summary["pipelines"]:
        facts += [(f"calibrator {pipeline['name']}", f"SHA-256 {h}") for h in pipeline["calibrator_sha256"]]
    facts += [(name, f"SHA-256 {digest} (what this page shows)") for name, digest in results.digests.items()]
    return [*facts, ("same inputs", "The same data, calibrators, seed and versions give the same bytes in all files.")]
