"""Calibration of plain classifiers: (n, C) scores, labels, and features for the methods that use them.

The names below are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from segcal.classification.data import ScoreData, load_data
    from segcal.classification.estimator import ScoreCalibrator
    from segcal.classification.files import FittedMethod, fit, load
    from segcal.classification.methods import METHODS
    from segcal.classification.running import apply, evaluate, fit_methods
    from segcal.classification.samples import Samples

__all__ = [
    "METHODS",
    "FittedMethod",
    "Samples",
    "ScoreCalibrator",
    "ScoreData",
    "apply",
    "evaluate",
    "fit",
    "fit_methods",
    "load",
    "load_data",
]

_HOME = {
    "FittedMethod": "files",
    "METHODS": "methods",
    "Samples": "samples",
    "ScoreCalibrator": "estimator",
    "ScoreData": "data",
    "apply": "running",
    "evaluate": "running",
    "fit": "files",
    "fit_methods": "running",
    "load": "files",
    "load_data": "data",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
