"""Jobs that measure on labelled cases: an evaluation of calibrators, or a whole study; each with its report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from segcal.errors import UsageError
from segcal.evaluation.pipelines import pipeline_name
from segcal.evaluation.run import evaluate
from segcal.evaluation.study import STUDY_FILE, study
from segcal.evaluation.study_settings import load_study_settings
from segcal.evaluation.summary import HEADLINE
from segcal.fitted import FittedCalibrator
from segcal.manifest import Manifest
from segcal.report.page import write_report
from segcal.service.files import ServiceFiles
from segcal.service.requests import EvaluateRequest, StudyRequest
from segcal.service.work.context import JobFolder, WorkContext, fresh, stored_calibrator
from segcal.service.work.outcome import SHOWN_FAILURES, Outcome, failures, in_one_line
from segcal.service.work.paths import load_manifest

TABLES = tuple(f"out/{name}" for name in ("summary.json", "cases.csv", "table.md", "table.tex", "differences.csv"))
SHORT_HASH = 8


def run_evaluate(request: EvaluateRequest, job: JobFolder, context: WorkContext) -> Outcome:
    """Measure calibrators on the labelled cases of a manifest; cases that cannot be read are listed."""
    if request.split is None and request.subset is not None:
        raise UsageError(f"the subset {request.subset!r} is one of a split; name the split too")
    manifest = load_manifest(request.manifest, context.roots)
    result = evaluate(
        manifest,
        named_calibrators(request.calibrators, context.files),
        split=request.split,
        subset=request.subset or "test",
        keep_going=True,
        device=context.device,
        progress=context.progress,
        case_map=context.case_map,
    )
    result.save(fresh(job.out))
    return _reported(result.summary, job, context)


def run_study(request: StudyRequest, job: JobFolder, context: WorkContext) -> Outcome:
    """A study of a manifest; an interrupted one goes on with the fits and repeats it has."""
    manifest = load_manifest(request.manifest, context.roots)
    begun = (job.out / STUDY_FILE).is_file()
    try:
        summary = _study(manifest, request, job.out, context)
    except UsageError:
        if not begun:
            raise
        # Begun on files, or by a version, that have changed since: nothing of it can be used.
        summary = _study(manifest, request, fresh(job.out), context)
    return _reported(summary, job, context)


def named_calibrators(hashes: list[str], files: ServiceFiles) -> dict[str, FittedCalibrator]:
    """By the name of their row in every table; those of one method and pooling are told apart by their hash."""
    fitted = {sha256: stored_calibrator(sha256, files) for sha256 in dict.fromkeys(hashes)}
    usual = {sha256: pipeline_name(one.info.method, one.info.pooling) for sha256, one in fitted.items()}
    names = list(usual.values())
    return {
        usual[sha256] if names.count(usual[sha256]) == 1 else f"{usual[sha256]} {sha256[:SHORT_HASH]}": one
        for sha256, one in fitted.items()
    }


def _study(manifest: Manifest, request: StudyRequest, out: Path, context: WorkContext) -> Mapping[str, Any]:
    return study(
        manifest,
        load_study_settings(request.config),
        out,
        resume=True,
        device=context.device,
        progress=context.progress,
        case_map=context.case_map,
    ).summary


def _reported(summary: Mapping[str, Any], job: JobFolder, context: WorkContext) -> Outcome:
    """Write the report, and say in short what the tables say."""
    write_report(job.out, job.report, progress=context.progress)
    failed: dict[str, str] = dict(summary["failed"])
    pipelines = [
        {"name": p["name"], **{column: p["metrics"][column]["mean"] for column in HEADLINE}}
        for p in summary["pipelines"]
    ]
    result = {
        "n_cases": summary["n_cases"],
        "n_repeats": summary["n_repeats"],
        "pipelines": pipelines,
        **failures(job.said_all(failed)),
        "notes": [job.said(text) for text in summary["warnings"]][:SHOWN_FAILURES],
        "files": list(job.existing("report.html", *TABLES)),
    }
    parts = [f"{len(pipelines)} pipelines measured on {summary['n_cases']} cases"]
    parts += [f"{len(failed)} failed"] if failed else []
    return Outcome(in_one_line(parts), result)
