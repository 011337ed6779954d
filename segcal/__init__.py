"""Post-hoc calibration of nnU-Net ensembles.

The names below are loaded when they are first used, so `import segcal` reads no file, no environment variable and
none of the heavy libraries.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from segcal.evaluation.run import evaluate
    from segcal.evaluation.study import study
    from segcal.fitted import FittedCalibrator, load_calibrator
    from segcal.fitting.run import fit, fit_many
    from segcal.manifest import Manifest

__version__ = "0.1.0"

__all__ = ["FittedCalibrator", "Manifest", "__version__", "evaluate", "fit", "fit_many", "load_calibrator", "study"]

_HOME = {
    "FittedCalibrator": "segcal.fitted",
    "Manifest": "segcal.manifest",
    "evaluate": "segcal.evaluation.run",
    "fit": "segcal.fitting.run",
    "fit_many": "segcal.fitting.run",
    "load_calibrator": "segcal.fitted",
    "study": "segcal.evaluation.study",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
