"""`segcal.evaluate`: pipelines on the labelled cases of a manifest, and the files that come of it."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch

import segcal
from segcal.case_map import CaseMap, in_process
from segcal.checks.tell_tales import TellTales
from segcal.device import resolve_device
from segcal.errors import DataError, SegcalError
from segcal.evaluation.measure import MeasuredCase
from segcal.evaluation.pictures import CasePicture
from segcal.evaluation.pipelines import Pipeline, baselines, calibrated_pipeline, check_names, member_pipeline
from segcal.evaluation.records import BINS_FILE, CASES_FILE, CaseRecord, Records
from segcal.evaluation.seen_cases import seen_in_fit
from segcal.evaluation.summary import BootstrapSettings, summarise, to_json
from segcal.evaluation.tables import differences_csv, latex_table, markdown_table
from segcal.evaluation.work import MeasureWork
from segcal.fitted import FittedCalibrator
from segcal.io.archive import write_npz
from segcal.io.atomic import atomic_write, check_folder, write_text_atomic
from segcal.io.own_files import PAGE_FILE, check_replaceable
from segcal.manifest import Manifest
from segcal.metrics import MetricSettings
from segcal.types import Progress

SUMMARY_FILE, PICTURES = "summary.json", "pictures"
RESULT_FILES = (SUMMARY_FILE, CASES_FILE, BINS_FILE, "table.md", "table.tex", "differences.csv")


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """Everything an evaluation found.

    Attributes:
        records: the per-case table.
        summary: the content of summary.json.
        pictures: by case id.
        failed: cases that could not be measured, with the message; only with `keep_going`.
    """

    records: Records
    summary: Mapping[str, Any]
    pictures: Mapping[str, CasePicture]
    failed: Mapping[str, str]

    def save(self, folder: Path) -> None:
        """Write cases.csv, bins.npz, summary.json, table.md, table.tex, differences.csv and the pictures."""
        save_summary(self.summary, folder)  # first: it says whose folder this is, should the rest not be written
        self.records.save(folder)
        save_pictures(self.pictures, folder)


def evaluate(
    manifest: Manifest,
    calibrators: Sequence[FittedCalibrator] | Mapping[str, FittedCalibrator] = (),
    *,
    split: int | None = None,
    subset: str = "test",
    cases: Sequence[str] | None = None,
    metrics: MetricSettings | None = None,
    bootstrap: BootstrapSettings | None = None,
    count_outside: bool = True,
    each_member: bool = False,
    force: bool = False,
    keep_going: bool = False,
    device: torch.device | str = "auto",
    progress: Progress | None = None,
    case_map: CaseMap = in_process,
) -> Evaluation:
    """Measure calibrators and the uncalibrated ensemble on labelled cases, reading each case once.

    Args:
        calibrators: fitted ones; a mapping gives them names of your own.
        split, subset: cases of a given split (`test` by default); without `split` all labelled cases.
        cases: ids, instead of a split.
        metrics: bins and bands; the paper's by default.
        bootstrap: replicates and seed of the intervals.
        count_outside: voxels outside the crop count as certain background.
        each_member: also measure every calibrator applied to each member before their probabilities are averaged.
        force: evaluate a shift-sensitive calibrator on the other kind of files all the same.
        keep_going: leave cases out that cannot be read, and name them.
        device: where voxels are processed.
        progress: told about cases.
        case_map: where the cases are worked on; here, one after the other, by default.
    """
    named = calibrators if isinstance(calibrators, Mapping) else dict[str, FittedCalibrator]()
    chosen = [calibrated_pipeline(fitted, name=name) for name, fitted in named.items()]
    if not isinstance(calibrators, Mapping):
        chosen = [calibrated_pipeline(fitted) for fitted in calibrators]
    if each_member:
        chosen += [member_pipeline(pipeline) for pipeline in chosen]
    warnings = [text for p in chosen for text in p.fitted.check_compatible(manifest, p.applied, force=force)]
    pipelines = [*baselines(manifest), *chosen]
    check_names(pipelines)
    ids = case_ids(manifest, split, subset, cases)
    settings = metrics or MetricSettings(manifest.class_names)
    on_device = resolve_device(device, sums=True)
    pictured = pictured_pipeline(pipelines)
    work = MeasureWork(manifest, tuple(pipelines), settings, on_device, pictured, count_outside)
    measured, failed = list[MeasuredCase](), dict[str, str]()
    with closing(case_map(work, ids)) as outcomes:
        for done, outcome in enumerate(outcomes, start=1):
            try:
                measured.append(outcome.result())
            except SegcalError as error:
                if not keep_going:
                    raise
                failed[outcome.item] = str(error)
            if progress is not None:
                progress("evaluating", done, len(ids))
    if not measured:
        raise DataError(f"manifest {manifest.name!r}: no case could be evaluated")
    everything = cases is None and (split is None or subset != "test")
    warnings += seen_in_fit(chosen, measured, manifest if everything else None)
    records = to_records(manifest, measured, repeat=0)
    context = run_context("evaluate", manifest, measured, pictured=pictured, failed=failed, warnings=warnings)
    context |= {"split": split, "subset": None if split is None else subset}
    hashes = calibrator_hashes([pipelines])
    summary = summarise(records, pipelines, settings, bootstrap or BootstrapSettings(), context, hashes)
    pictures = {m.case_id: m.picture for m in measured if m.picture is not None}
    return Evaluation(records, summary, pictures, failed)


def case_ids(manifest: Manifest, split: int | None, subset: str, cases: Sequence[str] | None) -> list[str]:
    """The labelled cases to evaluate, sorted, so that no order changes a result."""
    if cases is not None:
        ids = list(cases)
    elif split is not None:
        ids = list(manifest.split_ids(split).subset(subset))
    else:
        ids = [case.id for case in manifest.labelled_cases]
    if not ids:
        what = f"subset {subset!r} of split {split}" if split is not None else "manifest"
        raise DataError(f"manifest {manifest.name!r}: the {what} has no labelled case to evaluate")
    return sorted(set(ids))


def pictured_pipeline(pipelines: Sequence[Pipeline]) -> str:
    """Whose maps the report shows: the default method if it is there, else the first that keeps the decision."""
    calibrated = [p for p in pipelines if p.calibrated]
    default = [p for p in calibrated if p.method == "cms_ap"]
    keeping = [p for p in calibrated if not p.can_flip]
    return [*default, *keeping, *calibrated, *reversed(pipelines)][0].name


def calibrator_hashes(repeats: Sequence[Sequence[Pipeline]]) -> dict[str, list[str]]:
    """By calibrated pipeline, the hash of its calibrator file in every repeat."""
    names = [p.name for p in repeats[0] if p.calibrated]
    return {name: [p.fitted.sha256 for row in repeats for p in row if p.name == name] for name in names}


def to_records(manifest: Manifest, measured: Sequence[MeasuredCase], *, repeat: int) -> Records:
    """Records of one repeat: pipeline by pipeline, in the order of the cases."""
    names = list(measured[0].results)
    rows = []
    for name in names:
        for one in measured:
            case, result = manifest.case(one.case_id), one.results[name]
            rows.append(
                CaseRecord(repeat, name, case.id, case.subject_key, case.group or "", result.values, result.tables)
            )
    return Records(tuple(rows))


def run_context(
    kind: str,
    manifest: Manifest,
    measured: Sequence[MeasuredCase],
    *,
    pictured: str,
    failed: Mapping[str, str],
    warnings: Sequence[str],
) -> dict[str, Any]:
    """What was run on what, for summary.json and the report."""
    once = {one.case_id: one for one in measured}
    noticed = TellTales(
        len(once),
        {case: one.fill for case, one in sorted(once.items()) if one.fill},
        {case: one.turned for case, one in sorted(once.items()) if one.turned is not None},
        {case: one.odd for case, one in sorted(once.items()) if one.odd is not None},
    )
    return {
        "run": kind,
        "manifest": {"name": manifest.name, "sha256": manifest.sha256, "kind": manifest.kind},
        "classes": list(manifest.class_names),
        "regions": manifest.has_regions,
        "n_members": manifest.n_members,
        "pictured": pictured,
        "free_energy": {case: dict(one.energy) for case, one in sorted(once.items())},
        "outside_share": {case: one.outside_share for case, one in sorted(once.items()) if one.outside_share},
        "n_floored": sum(one.n_floored for one in once.values()),
        "failed": dict(failed),
        "warnings": list(dict.fromkeys([*noticed.warnings(), *warnings])),
        "versions": {
            "segcal": segcal.__version__,
            "python": platform.python_version(),
            "torch": version("torch"),
            "numpy": version("numpy"),
        },
    }


def check_results_folder(folder: Path, run: Literal["evaluate", "study"]) -> None:
    """Say before the work that results cannot be written into a folder, or would replace files of somebody else."""
    check_folder(folder)
    pictures = (f"{PICTURES}/{path.name}" for path in (folder / PICTURES).glob("*.npz"))
    check_replaceable(
        folder,
        [*RESULT_FILES, PAGE_FILE, *pictures],
        record=SUMMARY_FILE,
        ours=lambda summary: summary.get("run") == run,
    )


def save_summary(summary: Mapping[str, Any], folder: Path) -> None:
    """Write summary.json, table.md, table.tex and differences.csv; the page of results that were here before goes."""
    write_text_atomic(folder / SUMMARY_FILE, to_json(summary))
    (folder / PAGE_FILE).unlink(missing_ok=True)
    write_text_atomic(folder / "table.md", markdown_table(summary))
    write_text_atomic(folder / "table.tex", latex_table(summary))
    write_text_atomic(folder / "differences.csv", differences_csv(summary))


def save_pictures(pictures: Mapping[str, CasePicture], folder: Path) -> None:
    """Write the slices the report shows; those of results that were here before go."""
    (folder / PICTURES).mkdir(parents=True, exist_ok=True)
    for path in (folder / PICTURES).glob("*.npz"):
        if path.stem not in pictures:
            path.unlink()
    for case_id, picture in pictures.items():
        with atomic_write(folder / PICTURES / f"{case_id}.npz") as temporary:
            write_npz(temporary, picture.arrays())
