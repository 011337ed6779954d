"""How unusual a case is beside the cases the calibrator was fitted on: robust z-scores of its logit statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from segcal.cases import CaseData
from segcal.metrics.base import Score, Undefined
from segcal.metrics.energy import FreeEnergy, mean_confidence
from segcal.types import Kind

STATISTICS = ("free_energy_mean", "free_energy_std", "confidence_mean")
"""What a calibrator remembers of every calibration case, see `CalibratorInfo.reference_statistics`."""

NO_LOGITS = Undefined("the logits are not at hand: applied folders hold calibrated probabilities")
NO_REFERENCE = Undefined("the calibrator file holds no statistics of its calibration cases")
OTHER_KIND = Undefined(
    "the calibrator was fitted on the other kind of files: logits and probabilities have no common free energy"
)
NO_VARIATION = Undefined("the calibration cases do not differ in it")
_SCALE = 1.4826
"""Makes the median absolute deviation the standard deviation of a normal distribution."""
_ROUNDING = 1e-6


def robust_z(value: float, reference: Sequence[float], *, min_cases: int) -> Score:
    """(value - median) / (1.4826 MAD) against the calibration cases.

    Pooled probabilities have free energy 0 up to rounding; a spread of that size is no scale to measure with.
    """
    known = np.array([x for x in reference if np.isfinite(x)], dtype=np.float64)
    if known.size == 0:
        return NO_REFERENCE
    if known.size < min_cases:
        return Undefined(f"{known.size} calibration cases are too few, {min_cases} are needed")
    if not np.isfinite(value):
        return Undefined("the case has no voxel where the network predicted")
    median = float(np.median(known))
    scale = _SCALE * float(np.median(np.abs(known - median)))
    if scale <= _ROUNDING * max(1.0, abs(median)):
        return NO_VARIATION
    return (value - median) / scale


def case_statistics(case: CaseData, *, regions: bool, fitted_on: Kind) -> dict[str, float]:
    """The statistics of one case, computed as they were for the calibration cases.

    Probabilities have lost the offset of their logits, and with it the free energy: on files of the other kind than
    the calibrator was fitted on, only the confidence is compared.
    """
    confidence = {"confidence_mean": mean_confidence(case.logits, regions=regions, inside=case.inside)}
    if case.kind != fitted_on:
        return confidence
    energy = FreeEnergy()
    energy.update(case.case_id, case.logits, inside=case.inside)
    return {**energy.compute()[case.case_id], **confidence}


def outlyingness(
    statistics: Mapping[str, float] | None, reference: Mapping[str, Sequence[float]], *, min_cases: int
) -> dict[str, Score]:
    """A z-score for each statistic; undefined without logits, and where the files allow no comparison."""
    if statistics is None:
        return dict.fromkeys(STATISTICS, NO_LOGITS)
    return {
        name: robust_z(statistics[name], reference.get(name, ()), min_cases=min_cases)
        if name in statistics
        else OTHER_KIND
        for name in STATISTICS
    }
