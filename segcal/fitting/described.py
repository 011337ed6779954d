"""What a fit becomes: the calibrator with what its file says of it, statistics and warnings included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import segcal
from segcal.calibrator_info import CalibratorInfo
from segcal.calibrators import CALIBRATORS, Calibrator
from segcal.counted import count
from segcal.errors import MismatchError
from segcal.fitted import FittedCalibrator, is_translation_invariant
from segcal.fitting.exact import KKT_PROMISE
from segcal.fitting.gather import Gathered
from segcal.fitting.methods import MethodFit
from segcal.manifest import Manifest
from segcal.regions import RegionCalibrator
from segcal.settings import PipelineSettings
from segcal.types import Pooling

_ADAM_ON_SAMPLE = "the adam solver always stops early on the sample of voxels"

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


@dataclass(frozen=True, slots=True)
class FitContext:
    """What all calibrators of one fit have in common.

    Attributes:
        manifest, pooling: what they were fitted on.
        options: beyond the settings of each.
    """

    manifest: Manifest
    pooling: Pooling
    options: FitOptions

    def check_kind(self, method: str) -> None:
        """A shift-sensitive method needs true logits; probabilities have lost the shift it would use."""
        if self._needs_force(method) and not self.options.force:
            raise MismatchError(f"{self._lost_offset(method)}, or --force where the command has it.")

    def _needs_force(self, method: str) -> bool:
        return self.manifest.kind == "probabilities" and not self._translation_invariant(method)

    def _lost_offset(self, method: str) -> str:
        return (
            f"{method}: not translation-invariant, but the files of manifest {self.manifest.name!r} hold "
            "probabilities, which have lost the offset of the logits. Use ms_c, dc or cms_ap, or true logits"
        )

    def _translation_invariant(self, method: str) -> bool:
        return is_translation_invariant(method, self.pooling, regions=self.manifest.has_regions)

    def doubts(self, calibration: Gathered, n_cases: int) -> list[str]:
        """What a user should know of the calibration cases, whatever was fitted on them."""
        doubts = []
        if n_cases < FEW_CASES:
            said = f"fitted on {count(n_cases, 'case')} only"
            doubts.append(f"{said}; with fewer than {FEW_CASES} results vary from set to set")
        if calibration.n_floored:
            doubts.append(f"{calibration.n_floored:,} stored probabilities of 0 (or 1) were moved by the smallest step")
        for name, n_voxels in zip(self.manifest.class_names, calibration.label_counts, strict=True):
            if n_voxels == 0:
                doubts.append(f"class `{name}` has no labelled voxel in the calibration cases")
        return doubts

    def fitted(
        self, settings: PipelineSettings, channels: Sequence[MethodFit], calibration: Gathered, common: Sequence[str]
    ) -> FittedCalibrator:
        """One method's calibrator.

        Args:
            settings: of its pipeline.
            channels: its fit on the classes, or on every region.
            calibration: the sample of the calibration cases.
            common: warnings that concern all methods.
        """
        name, method = settings.method, CALIBRATORS[settings.method]
        calibrators = tuple(channel.solution.calibrator for channel in channels)
        calibrator = RegionCalibrator(calibrators) if self.manifest.has_regions else calibrators[0]
        warnings = list(common)
        if self.options.passes and settings.solver == "adam":
            what = "local temperature scaling is always fitted on patches" if method.spatial else _ADAM_ON_SAMPLE
            warnings.append(f"{what}, also with --full and --polish")
        if self._needs_force(name):
            warnings.insert(0, f"{self._lost_offset(name)}; fitted because of --force")
        for channel in channels:
            warnings += channel.solution.warnings
            if self.options.passes > 1 and settings.solver == "exact" and channel.solution.kkt > KKT_PROMISE:
                warnings.append(f"{name}: projected gradient {channel.solution.kkt:.1e} on all voxels after all passes")
        return FittedCalibrator(calibrator, self._info(settings, calibrator, channels, calibration, warnings))

    def _info(
        self,
        settings: PipelineSettings,
        calibrator: Calibrator | RegionCalibrator,
        channels: Sequence[MethodFit],
        calibration: Gathered,
        warnings: Sequence[str],
    ) -> CalibratorInfo:
        alike = all(channel.values == channels[0].values for channel in channels)
        values = channels[0].values if alike else {}
        by_region = {n: dict(c.values) for n, c in zip(self.manifest.class_names, channels, strict=False)}
        how = self.manifest.prediction
        validation = [channel.validation_nll for channel in channels]
        return CalibratorInfo(
            method=settings.method,
            solver=settings.solver,
            classes=self.manifest.class_names,
            regions=self.manifest.has_regions,
            pooling=self.pooling,
            kind=self.manifest.kind,
            n_members=self.manifest.n_members,
            translation_invariant=self._translation_invariant(settings.method),
            preserves=calibrator.preserves,
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
            seed=settings.seed,
            warnings=tuple(dict.fromkeys(warnings)),
        )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
