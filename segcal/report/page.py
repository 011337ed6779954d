"""`segcal report`: one self-contained HTML file from the results of evaluate, study or apply."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from segcal.applying.record import RECORD_NAME
from segcal.counted import count
from segcal.errors import MissingFileError, UsageError
from segcal.evaluation.summary import HEADLINE
from segcal.evaluation.tables import TITLES
from segcal.io.atomic import write_text_atomic
from segcal.io.own_files import PAGE_FILE, check_replaceable_file
from segcal.report import provenance
from segcal.report.applied_page import applied_page
from segcal.report.case_list import DETAIL, case_list
from segcal.report.case_pictures import case_pictures
from segcal.report.cautions import cautions
from segcal.report.charts import reliability_diagrams, stated_confidence
from segcal.report.comparisons import Comparisons
from segcal.report.definitions import definitions
from segcal.report.render import render
from segcal.report.result_tables import (
    DIFFERENCES,
    against_base,
    between_calibrated,
    bin_rows,
    difference_rows,
    group_rows,
    result_rows,
    variant_rows,
)
from segcal.report.results import SUMMARY_FILE, Results, load_results, read_summary
from segcal.report.roles import Roles, assign_roles
from segcal.report.verdict import Verdict, overview, verdicts
from segcal.report.wording import MEASURES
from segcal.types import Progress

MAX_PICTURES = 100


def write_report(
    folder: Path, out: Path | None = None, *, max_pictures: int = MAX_PICTURES, progress: Progress | None = None
) -> Path:
    """Write the page of a results folder and return where it is.

    Args:
        folder: what `segcal evaluate`, `segcal study` or `segcal apply` wrote.
        out: the page; `report.html` in the folder by default.
        max_pictures: so many of the worst cases carry a picture.
        progress: told about pictures.
    """
    path = folder / PAGE_FILE if out is None else out
    if path.is_dir():
        raise UsageError(f"{path}: is a folder; --out names the page itself, for example {path / PAGE_FILE}")
    check_replaceable_file(path, "page")
    write_text_atomic(path, report_page(folder, max_pictures=max_pictures, progress=progress))
    return path


def report_page(folder: Path, *, max_pictures: int = MAX_PICTURES, progress: Progress | None = None) -> str:
    """The text of the page; the same folder gives the same text."""
    if (folder / SUMMARY_FILE).is_file():
        if read_summary(folder / SUMMARY_FILE).get("run") == "classify":
            from segcal.classification.page import row_page  # rows of a classifier have a page of their own

            return row_page(folder)
        return evaluation_page(load_results(folder), max_pictures=max_pictures, progress=progress)
    if (folder / RECORD_NAME).is_file():
        _refuse_applied_rows(folder)
        return applied_page(folder)
    what = "no results in this folder" if folder.is_dir() else "not a folder"
    raise MissingFileError(
        f"{folder}: {what}. Expected {SUMMARY_FILE} (of `segcal evaluate`, `study` or `classify evaluate`) or "
        f"{RECORD_NAME} (of `segcal apply`); give the folder that was their --out."
    )


def _refuse_applied_rows(folder: Path) -> None:
    """A folder of `segcal classify apply` also has a run.json, and nothing measured that a page could show."""
    try:
        record = json.loads((folder / RECORD_NAME).read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        return  # whoever reads the record says what is wrong with it
    if isinstance(record, dict) and record.get("run") == "classify apply":
        raise UsageError(
            f"{folder}: written by `segcal classify apply`, which measures nothing a page could show. For a page, run "
            "`segcal classify evaluate CALIBRATOR DATA --out RESULTS` on labelled rows; it makes report.html itself."
        )


def evaluation_page(results: Results, *, max_pictures: int = MAX_PICTURES, progress: Progress | None = None) -> str:
    """The page of an evaluation or a study."""
    summary, records = results.summary, results.records
    roles = assign_roles(summary)
    comparisons = Comparisons(summary, records)
    cases = case_list(records, summary, roles)
    pictures, broken = case_pictures(results, roles, [line.case for line in cases.lines[:max_pictures]], progress)
    stated_names = roles.curves[:3]
    return render(
        "report.html.j2",
        **_words(results, roles),
        **_verdict_values(results, roles, comparisons),
        **_table_values(results, roles, comparisons),
        diagrams=reliability_diagrams(records, summary, roles),
        stated=stated_confidence(records, summary, stated_names),
        stated_names=stated_names,
        cases=cases,
        detail_columns=[MEASURES[column].short for column in DETAIL],
        pictures=pictures,
        broken=broken,
        n_pictures=len(pictures),
    )


def _words(results: Results, roles: Roles) -> dict[str, Any]:
    summary = results.summary
    how = summary["settings"]["bootstrap"]
    level = f"{100 * float(how['confidence_level']):g} %"
    repeated = int(summary["n_repeats"]) > 1
    return {
        "name": (summary.get("manifest") or {}).get("name") or results.folder.name,
        "lead": _lead(results, roles),
        "level": level,
        "repeated": repeated,
        "focus": roles.focus,
        "base": roles.base,
        "cautions": cautions(results),
        "facts": provenance.run_facts(results),
        "pipelines": provenance.pipeline_words(roles.main),
        "definitions": definitions(summary),
        "commands": provenance.commands(results),
        "reproduce": provenance.reproduce_facts(results),
        "settings_text": provenance.settings_text(summary),
        "result_caption": (
            f"Mean over {'repeats and ' if repeated else ''}cases with its {level} interval. The best mean of a column "
            "is bold; whiskers share one scale a column; grey rows are uncalibrated; a dash means “does not apply”."
        ),
    }


def _lead(results: Results, roles: Roles) -> str:
    summary = results.summary
    parts = [count(int(summary["n_cases"]), "labelled case")]
    if int(summary["n_repeats"]) > 1:
        parts.append(count(int(summary["n_repeats"]), "repeat"))
    if summary.get("n_members"):
        parts.append(count(int(summary["n_members"]), "ensemble member"))
    parts.append(count(len(roles.calibrated), "calibrated pipeline"))
    version = (summary.get("versions") or {}).get("segcal")
    return " · ".join([*parts, f"segcal {version}"] if version else parts)


def _verdict_values(results: Results, roles: Roles, comparisons: Comparisons) -> dict[str, Any]:
    found = verdicts(results.summary, roles, comparisons)
    shown: list[Verdict] = [v for v in found if v.name in roles.shown]
    return {
        "overview": overview(found),
        "verdicts": shown,
        "more_verdicts": len(found) > len(shown),
        "shown_why": "the pipeline of the pictures and those of lowest NLL, among them one that keeps every label",
    }


def _table_values(results: Results, roles: Roles, comparisons: Comparisons) -> dict[str, Any]:
    summary = results.summary
    return {
        "columns": [{"title": TITLES[column], "words": MEASURES[column].words} for column in HEADLINE],
        "result_rows": result_rows(roles.main),
        "difference_columns": [MEASURES[column].short for column in DIFFERENCES],
        "difference_rows": difference_rows(comparisons, against_base(roles)),
        "pair_rows": difference_rows(comparisons, between_calibrated(comparisons, roles)),
        "groups": group_rows(summary, roles),
        "sensitivity": _sensitivity(results, roles),
    }


def _sensitivity(results: Results, roles: Roles) -> dict[str, Any]:
    variants = []
    for what, title in (("M", "Number of ensemble members"), ("n", "Number of calibration cases")):
        rows = variant_rows(roles, what)
        caption = f"The same methods with fewer ({what}); the row without {what} is the one of the table above."
        variants += [{"title": title, "caption": caption, "rows": rows}] if rows else []
    bins = []
    for column in ("ece", "ace"):
        counts, lines = bin_rows(results.summary, roles, column)
        title = f"{MEASURES[column].short} by number of bins"
        caption = "A ranking that changes with the bins is not one to rely on."
        bins += [{"title": title, "caption": caption, "counts": counts, "rows": lines}] if counts else []
    return {"variants": variants, "bins": bins} if variants or bins else {}
