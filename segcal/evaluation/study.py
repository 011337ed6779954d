"""A study: every pipeline fitted and measured in every repeat, with intervals, resumable at any moment.

Fits and measured repeats are kept in files named by the hash of everything they depend on. A killed study goes
on where it stopped, and its tables are the same bytes as those of one that was never stopped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import segcal
from segcal.case_map import CaseMap, in_process
from segcal.data_hash import data_hash
from segcal.device import resolve_device
from segcal.errors import Interrupted, UsageError
from segcal.evaluation.measure import MeasuredCase
from segcal.evaluation.pictures import CasePicture
from segcal.evaluation.pipelines import Pipeline, baselines, calibrated_pipeline
from segcal.evaluation.plan import FitTask, plan_fits, study_splits
from segcal.evaluation.records import Records, join
from segcal.evaluation.run import (
    PICTURES,
    calibrator_hashes,
    check_results_folder,
    pictured_pipeline,
    run_context,
    save_pictures,
    save_summary,
    to_records,
)
from segcal.evaluation.shifted import shifted_data
from segcal.evaluation.study_settings import StudySettings
from segcal.evaluation.summary import BootstrapSettings, bin_sensitivity, summarise
from segcal.evaluation.work import MeasureWork
from segcal.fitted import FittedCalibrator, load_calibrator
from segcal.fitting.run import fit_many
from segcal.io.archive import read_npz_array, read_npz_header
from segcal.io.atomic import remove_unfinished, write_text_atomic
from segcal.manifest import Manifest
from segcal.metrics import MetricSettings
from segcal.settings import PipelineSettings
from segcal.types import Progress

FITS, REPEATS, SHIFTED, STUDY_FILE = "fits", "repeats", "shifted", "study.json"
IDENTITY = {
    "manifest": "the manifest",
    "files": "files of the cases",
    "shifted": "the shifted data",
    "settings": "settings",
    "segcal": "the version of segcal",
}
"""What the results of a study depend on, by their keys in study.json."""


@dataclass(frozen=True, slots=True, eq=False)
class StudyResult:
    """What a study found: the content of summary.json for the data and, if given, for the shifted data."""

    summary: Mapping[str, Any]
    shifted: Mapping[str, Any] | None


def study(
    manifest: Manifest,
    settings: StudySettings,
    out: Path,
    *,
    shifted: Manifest | None = None,
    resume: bool = False,
    device: torch.device | str = "auto",
    progress: Progress | None = None,
    case_map: CaseMap = in_process,
) -> StudyResult:
    """Run a study and write its tables into `out`.

    Args:
        manifest: the data; its given splits are the repeats, otherwise they are drawn.
        settings: pipelines and sizes.
        out: folder; `fits/` and `repeats/` in it are what a resumed study goes on from.
        shifted: other data, on which the fitted calibrators are measured without refitting (`out/shifted`); which of
            their cases, says `shifted_data`.
        resume: go on in a folder that holds a study of the same data and settings.
        device: where voxels are processed.
        progress: told about fits and cases.
        case_map: where the cases are worked on; here, one after the other, by default.

    Raises:
        Interrupted: Ctrl-C or SIGTERM; what was finished so far is kept.
    """
    run = _Study(manifest, settings, out, resolve_device(device, sums=True), progress, case_map)
    # What cannot be done is said before the folder belongs to this study.
    splits = study_splits(manifest, settings)
    tasks = [plan_fits(manifest, settings, split) for split in splits]
    other = None if shifted is None else shifted_data(shifted, manifest, splits, tasks[0])
    _open_folder(out, run.identity(shifted), resume=resume)
    try:
        fitted = [run.fit_repeat(repeat, planned) for repeat, planned in enumerate(tasks)]
        summary = run.measure(manifest, [split.test for split in splits], fitted, out)
        if other is None:
            return StudyResult(summary, None)
        return StudyResult(summary, run.measure(other.manifest, other.ids, fitted, out / SHIFTED, other.warnings))
    except KeyboardInterrupt:
        raise Interrupted(f"fits and repeats in {out} are kept; run the same command with --resume to go on") from None


@dataclass(frozen=True, slots=True)
class _Study:
    manifest: Manifest
    settings: StudySettings
    out: Path
    device: torch.device
    progress: Progress | None
    case_map: CaseMap

    def identity(self, shifted: Manifest | None) -> dict[str, Any]:
        """Everything the results depend on."""
        return {
            "manifest": self.manifest.sha256,
            "files": data_hash(self.manifest),
            "shifted": None if shifted is None else [shifted.sha256, data_hash(shifted)],
            "settings": self.settings.model_dump(mode="json"),
            "segcal": segcal.__version__,
        }

    @property
    def metrics(self) -> MetricSettings:
        return MetricSettings(
            self.manifest.class_names,
            include_background=self.settings.include_background,
            extra_bins=self.settings.bins,
        )

    def fit_repeat(self, repeat: int, tasks: Sequence[FitTask]) -> list[Pipeline]:
        """All calibrated pipelines of one repeat, from the cache or fitted now."""
        pipelines: dict[str, Pipeline] = {}
        for task in tasks:
            files = {method: self._fit_file(task, method) for method in task.methods}
            missing = [method for method, path in files.items() if not path.is_file()]
            if missing:
                for method, fitted in self._fit(task, missing, repeat).items():
                    fitted.save(files[method])
            for method, path in files.items():
                name = task.pipeline_name(method)
                pipelines[name] = calibrated_pipeline(load_calibrator(path), name=name, n_members=task.n_members)
        return [*baselines(self.manifest), *pipelines.values()]

    def measure(
        self,
        manifest: Manifest,
        ids: Sequence[Sequence[str]],
        fitted: Sequence[Sequence[Pipeline]],
        out: Path,
        warnings: Sequence[str] = (),
    ) -> Mapping[str, Any]:
        """Measure every repeat's pipelines on its cases, each case read once, and write the tables."""
        out.mkdir(parents=True, exist_ok=True)
        repeats = [
            self._measure_repeat(manifest, repeat, sorted(cases), pipelines)
            for repeat, (cases, pipelines) in enumerate(zip(ids, fitted, strict=True))
        ]
        records = join(r.records for r in repeats)
        pipelines = list(fitted[0])
        bootstrap = BootstrapSettings(n_replicates=self.settings.replicates, seed=self.settings.seed)
        context = run_context(
            "study",
            manifest,
            [case for r in repeats for case in r.cases],
            pictured=pictured_pipeline(pipelines),
            failed={},
            warnings=[*warnings, *(text for row in fitted for p in row for text in _warnings(p))],
        )
        context["study"] = self.settings.model_dump(mode="json")
        context["bins"] = bin_sensitivity(records, self.metrics)
        summary = summarise(records, pipelines, self.metrics, bootstrap, context, calibrator_hashes(fitted))
        records.save(out)
        save_summary(summary, out)
        save_pictures({case: picture for r in reversed(repeats) for case, picture in r.pictures.items()}, out)
        return summary

    def _fit(self, task: FitTask, methods: Sequence[str], repeat: int) -> dict[str, FittedCalibrator]:
        def report(stage: str, done: int, total: int) -> None:
            if self.progress is not None:
                self.progress(f"repeat {repeat + 1} {task.label}: {stage}", done, total)

        given = {method: self._pipeline_settings(task, method) for method in methods}
        return fit_many(
            task.manifest,
            methods,
            pooling=task.pooling,
            split=task.split,
            settings=given,
            device=self.device,
            progress=report,
            case_map=self.case_map,
        )

    def _pipeline_settings(self, task: FitTask, method: str) -> PipelineSettings:
        own = self.settings
        return PipelineSettings(
            method=method,
            pooling=task.pooling,
            trials=own.trials,
            rows=own.rows,
            max_patches=own.max_patches,
            seed=own.seed,
        )

    def _fit_file(self, task: FitTask, method: str) -> Path:
        content = {
            "manifest": task.manifest.sha256,
            "split": task.split.model_dump(mode="json"),
            "settings": self._pipeline_settings(task, method).model_dump(mode="json"),
            "segcal": segcal.__version__,
        }
        folder = self.out / FITS
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{method}_{task.pooling}_{_hash(content)}.safetensors"

    def _measure_repeat(
        self, manifest: Manifest, repeat: int, ids: Sequence[str], pipelines: Sequence[Pipeline]
    ) -> _Repeat:
        content = {
            "manifest": manifest.sha256,
            "cases": list(ids),
            "pipelines": {p.name: p.fitted.sha256 for p in pipelines},
            "metrics": repr(self.metrics),
            "repeat": repeat,
            "segcal": segcal.__version__,
        }
        folder = self.out / REPEATS / _hash(content)
        if (folder / "done").is_file():
            return _load_repeat(folder)
        pictured = pictured_pipeline(pipelines)
        work = MeasureWork(manifest, tuple(pipelines), self.metrics, self.device, pictured)
        measured = []
        with closing(self.case_map(work, ids)) as outcomes:
            for done, outcome in enumerate(outcomes, start=1):
                measured.append(outcome.result())
                if self.progress is not None:
                    self.progress(f"repeat {repeat + 1}: evaluating", done, len(ids))
        _save_repeat(folder, to_records(manifest, measured, repeat=repeat), measured)
        return _load_repeat(folder)


@dataclass(frozen=True, slots=True, eq=False)
class _Repeat:
    """A measured repeat as it lies on disk; the results in `cases` are in `records`."""

    records: Records
    cases: tuple[MeasuredCase, ...]
    pictures: Mapping[str, CasePicture]


def _save_repeat(folder: Path, records: Records, measured: Sequence[MeasuredCase]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    records.save(folder)
    save_pictures({m.case_id: m.picture for m in measured if m.picture is not None}, folder)
    context = [
        {
            "case": m.case_id,
            "energy": m.energy,
            "n_floored": m.n_floored,
            "outside": m.outside_share,
            "fill": m.fill,
            "turned": m.turned,
            "odd": m.odd,
        }
        for m in measured
    ]
    write_text_atomic(folder / "context.json", json.dumps(context, sort_keys=True))
    write_text_atomic(folder / "done", "")


def _load_repeat(folder: Path) -> _Repeat:
    context = json.loads((folder / "context.json").read_text(encoding="utf-8"))
    cases = tuple(
        MeasuredCase(
            case_id=c["case"],
            results={},
            energy=c["energy"],
            n_floored=c["n_floored"],
            outside_share=c["outside"],
            picture=None,
            fill=c["fill"],
            turned=c["turned"],
            odd=c.get("odd"),  # not in repeats that were finished before it was looked for
        )
        for c in context
    )
    pictures = {}
    for path in sorted((folder / PICTURES).glob("*.npz")):
        arrays = {name: read_npz_array(path, name) for name in read_npz_header(path)}
        pictures[path.stem] = CasePicture.from_arrays(arrays)
    return _Repeat(Records.load(folder), cases, pictures)


def _open_folder(out: Path, identity: Mapping[str, Any], *, resume: bool) -> None:
    """A folder holds one study; what is left of a killed one is taken up only when asked for."""
    path = out / STUDY_FILE
    text = json.dumps(identity, sort_keys=True, indent=1) + "\n"
    if path.is_file():
        if not resume:
            raise UsageError(f"{out} already holds a study; go on with --resume, or choose another --out")
        before = path.read_text(encoding="utf-8")
        if before != text:
            raise UsageError(f"{out} holds another study: {_changes(before, identity)}; choose another --out")
        remove_unfinished(out, (FITS, REPEATS, SHIFTED, PICTURES))
        return
    check_results_folder(out, "study")
    if identity["shifted"] is not None:
        check_results_folder(out / SHIFTED, "study")
    write_text_atomic(path, text)


def _changes(before: str, identity: Mapping[str, Any]) -> str:
    """What keeps a study from being taken up, in words."""
    try:
        was = json.loads(before)
        settings = {name for name, value in identity["settings"].items() if was["settings"].get(name) != value}
        changed = [name for name in IDENTITY if was.get(name) != identity[name]]
    except (ValueError, RecursionError, LookupError, AttributeError, TypeError):
        return f"its {STUDY_FILE} is none that this version writes"
    named = {**IDENTITY, "settings": f"{IDENTITY['settings']} ({', '.join(sorted(settings)) or 'one was left out'})"}
    return f"{', '.join(named[name] for name in changed) or STUDY_FILE} changed"


def _warnings(pipeline: Pipeline) -> list[str]:
    return [f"{pipeline.name}: {text}" for text in pipeline.fitted.info.warnings]


def _hash(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]
