"""Post-hoc calibration of nnU-Net ensembles.

The names below are loaded when they are first used, so `import segcal` reads no file, no environment variable and
none of the heavy libraries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from segcal.lazy_names import lazy_names

if TYPE_CHECKING:
    from segcal.evaluation.run import evaluate
    from segcal.evaluation.study import study
    from segcal.fitted import FittedCalibrator, load_calibrator
    from segcal.fitting.run import fit, fit_many
    from segcal.manifest import Manifest

__version__ = "0.1.0"

__all__ = ["FittedCalibrator", "Manifest", "__version__", "evaluate", "fit", "fit_many", "load_calibrator", "study"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "FittedCalibrator": "fitted",
        "Manifest": "manifest",
        "evaluate": "evaluation.run",
        "fit": "fitting.run",
        "fit_many": "fitting.run",
        "load_calibrator": "fitted",
        "study": "evaluation.study",
    },
)
