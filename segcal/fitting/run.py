"""Fitting calibrators on a manifest: one read of the data for all methods, then each is tuned and solved."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch

import segcal
from segcal.calibrator_info import CalibratorInfo
from segcal.calibrators import CALIBRATORS, Calibrator
from segcal.calibrators.base import Preserves
from segcal.case_map import CaseMap, in_process
from segcal.data_hash import data_hash
from segcal.device import resolve_device
from segcal.errors import DataError, MismatchError, UsageError
from segcal.fitted import FittedCalibrator, is_translation_invariant
from segcal.fitting.exact import KKT_PROMISE
from segcal.fitting.gather import Gathered, SampleSizes, gather
from segcal.fitting.gradient_work import GradientWork
from segcal.fitting.likelihood import mean_nll
from segcal.fitting.methods import Channel, MethodFit, TuningJob, fit_method, tuned_names
from segcal.fitting.polish import MAX_PASSES, Key, Sums, polish
from segcal.manifest import Manifest, Split, draw_split
from segcal.regions import RegionCalibrator
from segcal.settings import PipelineSettings
from segcal.threads import one_thread
from segcal.types import Pooling, Progress

Sample = TypeVar("Sample")

FEW_CASES = 10
"""A calibration set with fewer cases is named in the warnings; SEG App. F sees noise below about 14."""


@dataclass(frozen=True, slots=True)
class FitOptions:
    """What a fit does beyond its pipelines' settings.

    Attributes:
        passes: reads of all voxels that bring the sample's optimum to theirs: 0 none, 1 polish, more full.
        force: fit a shift-sensitive method on probability files all the same.
        storage: file that keeps finished trials, so that a killed fit goes on.
    """

    passes: int = 0
    force: bool = False
    storage: Path | None = None


def fit(manifest: Manifest, *, method: str, pooling: Pooling = "logits", **options: Any) -> FittedCalibrator:
    """Fit one calibrator; takes the same options as `fit_many`."""
    return fit_many(manifest, [method], pooling=pooling, **options)[method]


def fit_many(
    manifest: Manifest,
    methods: Sequence[str],
    *,
    pooling: Pooling = "logits",
    split: int | Split | None = None,
    settings: Mapping[str, PipelineSettings] | None = None,
    trials: int | None = None,
    lambda_: float | None = None,
    mu: float | None = None,
    solver: str | None = None,
    seed: int | None = None,
    full: bool = False,
    polished: bool = False,
    force: bool = False,
    storage: Path | None = None,
    device: torch.device | str = "auto",
    progress: Progress | None = None,
    case_map: CaseMap = in_process,
) -> dict[str, FittedCalibrator]:
    """Fit several calibrators from one read of the calibration and validation cases.

    Args:
        manifest: the data.
        methods: registry keys.
        pooling: how members are pooled.
        split: index of a given split, or a split; by default split 0 of the manifest, and without given splits
            all labelled cases with a validation share drawn from the seed.
        settings: by method; the shipped ones otherwise. The arguments after it override them.
        trials: settings tried when tuning.
        lambda_, mu: fix the regulariser; with both fixed nothing is tuned.
        solver: "exact" or "adam".
        seed: of sample, drawn split and tuning (0, or what the settings say).
        full: fit on every voxel (several reads) instead of the condensed sample (one read).
        polished: one correction that brings the sample's optimum within 0.001 % of that of all voxels; it costs two
            further reads, one for the slope over all voxels and one that measures the result.
        force: fit a shift-sensitive method on probability files all the same.
        storage: journal file of finished trials.
        device: where voxels are processed.
        progress: told about cases and trials.
        case_map: where cases and trials are worked on; here, one after the other, by default.
    """
    pipelines = {
        name: pipeline_settings(
            name, pooling, settings, trials=trials, lambda_=lambda_, mu=mu, solver=solver, seed=seed
        )
        for name in dict.fromkeys(methods)
    }
    _check_one_sample(pipelines.values())
    options = FitOptions(passes=MAX_PASSES if full else int(polished), force=force, storage=storage)
    run = _FitRun(manifest, pooling, pipelines, options, resolve_device(device, sums=True), progress, case_map)
    return run.fit(choose_split(manifest, split, pipelines.values(), next(iter(pipelines.values())).seed))


def pipeline_settings(
    method: str, pooling: Pooling, given: Mapping[str, PipelineSettings] | None, **overrides: object
) -> PipelineSettings:
    """The settings of one pipeline: given, or shipped; then what the caller overrides."""
    if method not in CALIBRATORS:
        raise UsageError(f"unknown method `{method}`; known are {', '.join(CALIBRATORS)}")
    if given is not None and method in given:
        base = given[method]
    else:
        base = PipelineSettings(method=method, pooling=pooling)
    if CALIBRATORS[method].spatial:
        overrides = {**overrides, "solver": "adam"}
    return base.changed(source=f"settings of {method}", **{**overrides, "pooling": pooling})


def choose_split(
    manifest: Manifest, split: int | Split | None, pipelines: Iterable[PipelineSettings], seed: int
) -> Split:
    """The cases to fit and to validate on."""
    if isinstance(split, Split):
        return split
    if split is not None:
        return manifest.split_ids(split)
    if manifest.splits:
        return manifest.splits[0]
    n_classes = 2 if manifest.has_regions else manifest.n_classes
    nothing_tuned = not any(tuned_names(settings, n_classes) for settings in pipelines)
    labelled = manifest.labelled_cases
    if nothing_tuned and len({case.subject_key for case in labelled}) == 1:
        return Split(calibration=tuple(case.id for case in labelled))
    return draw_split(manifest, seed=seed)


def _check_one_sample(pipelines: Iterable[PipelineSettings]) -> None:
    """One read makes one sample: methods fitted together must agree on its size and seed."""
    chosen = list(pipelines)
    local = [settings for settings in chosen if CALIBRATORS[settings.method].spatial]
    voxelwise = [settings for settings in chosen if not CALIBRATORS[settings.method].spatial]
    for field, concerned in (("seed", chosen), ("rows", voxelwise), ("max_patches", local)):
        values = {settings.method: getattr(settings, field) for settings in concerned}
        if len(set(values.values())) > 1:
            listed = ", ".join(f"{method} {value}" for method, value in values.items())
            raise UsageError(f"the methods' settings differ in `{field}` ({listed}); fit them in two calls")


@dataclass(frozen=True, slots=True)
class _FitRun:
    """One call of `fit_many`."""

    manifest: Manifest
    pooling: Pooling
    pipelines: Mapping[str, PipelineSettings]
    options: FitOptions
    device: torch.device
    progress: Progress | None
    case_map: CaseMap

    def fit(self, split: Split) -> dict[str, FittedCalibrator]:
        self._check_kinds()
        if not split.calibration:
            raise DataError(f"manifest {self.manifest.name!r}: the split has no calibration case")
        # Sorted, so that neither the manifest's order nor the split's changes a byte.
        calibration_ids, validation_ids = sorted(split.calibration), sorted(split.validation)
        with one_thread():
            calibration = self._gather(calibration_ids, "calibration cases")
            validation = self._gather(validation_ids, "validation cases") if validation_ids else None
            fits = self._fit_methods(calibration, validation, split)
            fits = self._polish(fits, calibration, validation, calibration_ids)
        common = [*calibration.doubts, *self._doubts(calibration, calibration_ids)]
        if validation is not None:
            common += [f"validation: {text}" for text in validation.doubts]
        return {
            name: self._fitted(name, [fits[channel, name] for channel in range(self._n_channels)], calibration, common)
            for name in self.pipelines
        }

    @property
    def _n_channels(self) -> int:
        return self.manifest.n_classes if self.manifest.has_regions else 1

    def _check_kinds(self) -> None:
        """A shift-sensitive method needs true logits; probabilities have lost the shift it would use."""
        for name in self.pipelines:
            if self._needs_force(name) and not self.options.force:
                raise MismatchError(f"{self._lost_offset(name)}, or --force.")

    def _needs_force(self, name: str) -> bool:
        return self.manifest.kind == "probabilities" and not self._translation_invariant(name)

    def _lost_offset(self, name: str) -> str:
        return (
            f"{name}: not translation-invariant, but the files of manifest {self.manifest.name!r} hold "
            "probabilities, which have lost the offset of the logits. Use ms_c, dc or cms_ap, or true logits"
        )

    def _translation_invariant(self, name: str) -> bool:
        return is_translation_invariant(name, self.pooling, regions=self.manifest.has_regions)

    def _gather(self, ids: Sequence[str], stage: str) -> Gathered:
        chosen = self.pipelines.values()
        voxelwise = [s.rows for s in chosen if not CALIBRATORS[s.method].spatial]
        local = [s.max_patches for s in chosen if CALIBRATORS[s.method].spatial]
        sizes = SampleSizes(max(voxelwise, default=0), max(local, default=0), next(iter(chosen)).seed)
        return gather(
            self.manifest,
            ids,
            pooling=self.pooling,
            sizes=sizes,
            device=self.device,
            progress=self.progress,
            stage=stage,
            case_map=self.case_map,
        )

    def _fit_methods(self, calibration: Gathered, validation: Gathered | None, split: Split) -> dict[Key, MethodFit]:
        fits: dict[Key, MethodFit] = {}
        kept = self.options.storage is not None
        files = data_hash(self.manifest, [*split.calibration, *split.validation]) if kept else ""
        for channel in range(self._n_channels):
            names = self.manifest.class_names
            if self.manifest.has_regions:
                names = (f"outside {names[channel]}", names[channel])
            samples = Channel(
                names,
                _at(calibration.rows, channel),
                None if validation is None else _at(validation.rows, channel),
                _at(calibration.patches, channel),
                None if validation is None else _at(validation.patches, channel),
            )
            for name, settings in self.pipelines.items():
                problem = self._problem(channel, settings, split, files)
                job = TuningJob(problem, self.options.storage, self._on_trial(name), self.case_map)
                fits[channel, name] = fit_method(settings, samples, job, device=self.device)
        return fits

    def _polish(
        self, fits: dict[Key, MethodFit], calibration: Gathered, validation: Gathered | None, ids: Sequence[str]
    ) -> dict[Key, MethodFit]:
        """Bring the exact fits to the optimum of all voxels."""
        chosen = {
            key: fitted
            for key, fitted in fits.items()
            if self.pipelines[key[1]].solver == "exact" and key[1] != "identity"
        }
        if not self.options.passes or not chosen:
            return fits
        results = polish(
            {key: fitted.solution for key, fitted in chosen.items()},
            {key: fitted.penalty for key, fitted in chosen.items()},
            calibration.rows,
            lambda calibrators: self._sums(calibrators, ids),
            max_passes=self.options.passes,
        )
        polished = {
            (channel, name): replace(
                fits[channel, name],
                solution=result.solution,
                fit_nll=result.nll,
                validation_nll=None
                if validation is None
                else mean_nll(result.solution.calibrator, validation.rows[channel]),
            )
            for (channel, name), result in results.items()
        }
        return {**fits, **polished}

    def _sums(self, calibrators: Mapping[Key, Calibrator], ids: Sequence[str]) -> Iterator[Sums]:
        """One read of all voxels, where the cases are worked on."""
        work = GradientWork(self.manifest, self.pooling, self.device, calibrators)
        with closing(self.case_map(work, ids)) as outcomes:
            for done, outcome in enumerate(outcomes, start=1):
                yield outcome.result()
                if self.progress is not None:
                    self.progress("all voxels", done, len(ids))

    def _on_trial(self, name: str) -> Callable[[int, int], None] | None:
        if self.progress is None:
            return None
        report = self.progress
        return lambda done, total: report(f"tuning {name}", done, total)

    def _problem(self, channel: int, settings: PipelineSettings, split: Split, files: str) -> str:
        """Everything a trial's result depends on; `files` stands for the content of the data."""
        content = {
            "channel": channel,
            "manifest": self.manifest.sha256,
            "files": files,
            "settings": settings.model_dump(mode="json"),
            "split": split.model_dump(mode="json"),
            "segcal": segcal.__version__,
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def _doubts(self, calibration: Gathered, ids: Sequence[str]) -> list[str]:
        doubts = []
        if len(ids) < FEW_CASES:
            cases = "1 case" if len(ids) == 1 else f"{len(ids)} cases"
            doubts.append(f"fitted on {cases} only; with fewer than {FEW_CASES} results vary from set to set")
        if calibration.n_floored:
            doubts.append(f"{calibration.n_floored:,} stored probabilities of 0 (or 1) were moved by the smallest step")
        for name, count in zip(self.manifest.class_names, calibration.label_counts, strict=True):
            if count == 0:
                doubts.append(f"class `{name}` has no labelled voxel in the calibration cases")
        return doubts

    def _fitted(
        self, name: str, channels: Sequence[MethodFit], calibration: Gathered, common: Sequence[str]
    ) -> FittedCalibrator:
        method, settings = CALIBRATORS[name], self.pipelines[name]
        calibrators = tuple(channel.solution.calibrator for channel in channels)
        calibrator = RegionCalibrator(calibrators) if self.manifest.has_regions else calibrators[0]
        warnings = list(common)
        if self.options.passes and method.spatial:
            warnings.append("local temperature scaling is always fitted on patches, also with --full and --polish")
        if self._needs_force(name):
            warnings.insert(0, f"{self._lost_offset(name)}; fitted because of --force")
        for channel in channels:
            warnings += channel.solution.warnings
            if self.options.passes > 1 and settings.solver == "exact" and channel.solution.kkt > KKT_PROMISE:
                warnings.append(f"{name}: projected gradient {channel.solution.kkt:.1e} on all voxels after all passes")
        return FittedCalibrator(calibrator, self._info(name, calibrator, channels, calibration, warnings))

    def _info(
        self,
        name: str,
        calibrator: Calibrator | RegionCalibrator,
        channels: Sequence[MethodFit],
        calibration: Gathered,
        warnings: Sequence[str],
    ) -> CalibratorInfo:
        alike = all(channel.values == channels[0].values for channel in channels)
        values = channels[0].values if alike else {}
        by_region = {n: dict(c.values) for n, c in zip(self.manifest.class_names, channels, strict=False)}
        preserves: Preserves = calibrator.preserves
        how = self.manifest.prediction
        validation = [channel.validation_nll for channel in channels]
        return CalibratorInfo(
            method=name,
            solver=self.pipelines[name].solver,
            classes=self.manifest.class_names,
            regions=self.manifest.has_regions,
            pooling=self.pooling,
            kind=self.manifest.kind,
            n_members=self.manifest.n_members,
            translation_invariant=self._translation_invariant(name),
            preserves=preserves,
            lambda_=values.get("lambda"),
            mu=values.get("mu"),
            alpha=values.get("alpha"),
            region_values=None if alike else by_region,
            fit_nll=sum(channel.fit_nll for channel in channels) / len(channels),
            validation_nll=_mean(validation),
            manifest_sha256=self.manifest.sha256,
            prediction=None if how is None else how.model_dump(mode="json", exclude_none=True),
            reference_statistics=calibration.statistics,
            versions={"segcal": segcal.__version__, "torch": version("torch"), "numpy": version("numpy")},
            seed=self.pipelines[name].seed,
            warnings=tuple(dict.fromkeys(warnings)),
        )


def _at(samples: Sequence[Sample], channel: int) -> Sample | None:
    return samples[channel] if samples else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
