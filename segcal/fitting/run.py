"""Fitting calibrators on a manifest: one read of the data for all methods, then each is tuned and solved."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

import segcal
from segcal.calibrators import CALIBRATORS, Calibrator
from segcal.calibrators.affine import AffineCalibrator
from segcal.case_map import CaseMap, in_process
from segcal.data_hash import data_hash
from segcal.device import resolve_device
from segcal.errors import DataError, UsageError
from segcal.fitted import FittedCalibrator
from segcal.fitting.described import FitContext, FitOptions
from segcal.fitting.gather import Gathered, SampleSizes, gather
from segcal.fitting.gradient_work import GradientWork
from segcal.fitting.likelihood import mean_nll
from segcal.fitting.methods import Channel, MethodFit, TuningJob, fit_method, goes_on_to_all_voxels, tuned_names
from segcal.fitting.polish import MAX_PASSES, Key, Sums, polish
from segcal.manifest import Manifest, Split, draw_split
from segcal.settings import PipelineSettings
from segcal.threads import one_thread
from segcal.types import Pooling, Progress

Sample = TypeVar("Sample")


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
    _check_passes(options.passes, pipelines)
    context = FitContext(manifest, pooling, options)
    run = _FitRun(context, pipelines, resolve_device(device, sums=True), progress, case_map)
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
    return base.changed(source=f"settings of {method}", **{**overrides, **_only_solver(method), "pooling": pooling})


def _only_solver(method: str) -> dict[str, str]:
    """Affine methods leave the choice; local temperature scaling and the mixture of `ets` have one solver each."""
    if CALIBRATORS[method].spatial:
        return {"solver": "adam"}
    return {} if issubclass(CALIBRATORS[method], AffineCalibrator) else {"solver": "exact"}


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


def _check_passes(passes: int, pipelines: Mapping[str, PipelineSettings]) -> None:
    """Refuse reads of all voxels that no method would make."""
    if not passes or any(goes_on_to_all_voxels(settings) for settings in pipelines.values()):
        return
    option = "--full" if passes > 1 else "--polish"
    has_choice = any(not _only_solver(method) for method in pipelines)
    raise UsageError(
        f"{option} moves an exact fit to the optimum of all voxels, and there is none here: "
        f"{', '.join(f'{method} (solver {settings.solver})' for method, settings in pipelines.items())}. "
        f"Leave out {option}{', or fit with --solver exact' if has_choice else ''}."
    )


@dataclass(frozen=True, slots=True)
class _FitRun:
    """One call of `fit_many`."""

    context: FitContext
    pipelines: Mapping[str, PipelineSettings]
    device: torch.device
    progress: Progress | None
    case_map: CaseMap

    def fit(self, split: Split) -> dict[str, FittedCalibrator]:
        for name in self.pipelines:
            self.context.check_kind(name)
        if not split.calibration:
            raise DataError(f"manifest {self.context.manifest.name!r}: the split has no calibration case")
        # Sorted, so that neither the manifest's order nor the split's changes a byte.
        calibration_ids, validation_ids = sorted(split.calibration), sorted(split.validation)
        with one_thread():
            calibration = self._gather(calibration_ids, "calibration cases")
            validation = self._gather(validation_ids, "validation cases") if validation_ids else None
            fits = self._fit_methods(calibration, validation, split)
            fits = self._polish(fits, calibration, validation, calibration_ids)
        common = [*calibration.doubts, *self.context.doubts(calibration, len(calibration_ids))]
        if validation is not None:
            common += [f"validation: {text}" for text in validation.doubts]
        return {
            name: self.context.fitted(
                settings, [fits[channel, name] for channel in range(self._n_channels)], calibration, common
            )
            for name, settings in self.pipelines.items()
        }

    @property
    def _n_channels(self) -> int:
        return self.context.manifest.n_classes if self.context.manifest.has_regions else 1

    def _gather(self, ids: Sequence[str], stage: str) -> Gathered:
        chosen = self.pipelines.values()
        voxelwise = [s.rows for s in chosen if not CALIBRATORS[s.method].spatial]
        local = [s.max_patches for s in chosen if CALIBRATORS[s.method].spatial]
        sizes = SampleSizes(max(voxelwise, default=0), max(local, default=0), next(iter(chosen)).seed)
        return gather(
            self.context.manifest,
            ids,
            pooling=self.context.pooling,
            sizes=sizes,
            device=self.device,
            progress=self.progress,
            stage=stage,
            case_map=self.case_map,
        )

    def _fit_methods(self, calibration: Gathered, validation: Gathered | None, split: Split) -> dict[Key, MethodFit]:
        fits: dict[Key, MethodFit] = {}
        kept = self.context.options.storage is not None
        files = data_hash(self.context.manifest, [*split.calibration, *split.validation]) if kept else ""
        for channel in range(self._n_channels):
            names = self.context.manifest.class_names
            if self.context.manifest.has_regions:
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
                job = TuningJob(problem, self.context.options.storage, self._on_trial(name), self.case_map)
                fits[channel, name] = fit_method(settings, samples, job, device=self.device)
        return fits

    def _polish(
        self, fits: dict[Key, MethodFit], calibration: Gathered, validation: Gathered | None, ids: Sequence[str]
    ) -> dict[Key, MethodFit]:
        """Bring the exact fits to the optimum of all voxels."""
        chosen = {key: fitted for key, fitted in fits.items() if goes_on_to_all_voxels(self.pipelines[key[1]])}
        if not self.context.options.passes or not chosen:
            return fits
        results = polish(
            {key: fitted.solution for key, fitted in chosen.items()},
            {key: fitted.penalty for key, fitted in chosen.items()},
            calibration.rows,
            lambda calibrators: self._sums(calibrators, ids),
            max_passes=self.context.options.passes,
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
        work = GradientWork(self.context.manifest, self.context.pooling, self.device, calibrators)
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
            "manifest": self.context.manifest.sha256,
            "files": files,
            "settings": settings.model_dump(mode="json"),
            "split": split.model_dump(mode="json"),
            "segcal": segcal.__version__,
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _at(samples: Sequence[Sample], channel: int) -> Sample | None:
    return samples[channel] if samples else None
