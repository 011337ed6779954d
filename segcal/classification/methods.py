"""All classification methods, by name. Adding one is a file, a line here, a changelog line; the suite finds it."""

from __future__ import annotations

from segcal.classification.base import RowMethod
from segcal.classification.beta import BetaCalibration
from segcal.classification.core import (
    ArgmaxConeRows,
    ConditionalDirichletRows,
    ConstrainedMatrixRows,
    DirichletRows,
    EnsembleTemperatureRows,
    IdentityRows,
    MatrixRows,
    OrderConeRows,
    TemperatureRows,
    VectorRows,
)
from segcal.classification.histogram import HistogramBinning
from segcal.classification.isotonic import IsotonicCalibration
from segcal.classification.kernel import KernelCalibration
from segcal.classification.local_nets import LocalNets
from segcal.classification.mac_cal import MaskedClassifier
from segcal.classification.meta import MetaAccuracy, MetaMiscoverage
from segcal.classification.platt import PlattScaling
from segcal.classification.temperature_search import HardBinnedTemperature, SoftBinnedTemperature
from segcal.classification.vq import LocalDirichletCalibration, QuantisedDirichlet, QuantisedHead

METHODS: dict[str, type[RowMethod]] = {
    "identity": IdentityRows,
    "ts": TemperatureRows,
    "ets": EnsembleTemperatureRows,
    "vs": VectorRows,
    "ms": MatrixRows,
    "ms_c": ConstrainedMatrixRows,
    "dc": DirichletRows,
    "cdc": ConditionalDirichletRows,
    "cms_ap": ArgmaxConeRows,
    "cms_op": OrderConeRows,
    "ts_sb_ece": SoftBinnedTemperature,
    "ts_hb_ece": HardBinnedTemperature,
    "platt": PlattScaling,
    "beta": BetaCalibration,
    "isotonic": IsotonicCalibration,
    "histogram": HistogramBinning,
    "meta_acc": MetaAccuracy,
    "meta_mis": MetaMiscoverage,
    "kcal": KernelCalibration,
    "vq": LocalDirichletCalibration,
    "vq_dc": QuantisedDirichlet,
    "vq_nc": QuantisedHead,
    "local_nets": LocalNets,
    "mac_cal": MaskedClassifier,
}

__all__ = ["METHODS", "RowMethod"]
