"""All calibrators, by the name the papers use. Adding one is a file, a line here, its test, a changelog line."""

from __future__ import annotations

from segcal.calibrators.base import Calibrator
from segcal.calibrators.class_conditional import ArgmaxConeScaling, ConditionalDirichlet, OrderConeScaling
from segcal.calibrators.ensemble_temperature import EnsembleTemperatureScaling
from segcal.calibrators.identity import Identity
from segcal.calibrators.local_temperature import LocalTemperatureScaling, LocalTemperatureScalingTI
from segcal.calibrators.matrix import ConstrainedMatrixScaling, DirichletCalibration, MatrixScaling, VectorScaling
from segcal.calibrators.temperature import TemperatureScaling

CALIBRATORS: dict[str, type[Calibrator]] = {
    "identity": Identity,
    "ts": TemperatureScaling,
    "ets": EnsembleTemperatureScaling,
    "vs": VectorScaling,
    "ms": MatrixScaling,
    "ms_c": ConstrainedMatrixScaling,
    "dc": DirichletCalibration,
    "cdc": ConditionalDirichlet,
    "cms_ap": ArgmaxConeScaling,
    "cms_op": OrderConeScaling,
    "lts": LocalTemperatureScaling,
    "lts_ti": LocalTemperatureScalingTI,
}

__all__ = ["CALIBRATORS", "Calibrator"]
