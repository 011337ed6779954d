"""nnU-Net at the edge: its folders read without it, its predictor wrapped where it is installed.

Importing this package imports nothing of nnU-Net. `postprocess` and `collect` work on files alone and need no nnunetv2;
`export`, `predict`, `hook` and `CalibratedPredictor` need the extra `nnunet` and import it when they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from segcal.lazy_names import lazy_names

if TYPE_CHECKING:
    from segcal.nnunet.hook import calibrated_export
    from segcal.nnunet.predictor import CalibratedPredictor, calibrated_probabilities

__all__ = ["CalibratedPredictor", "calibrated_export", "calibrated_probabilities"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {"CalibratedPredictor": "predictor", "calibrated_export": "hook", "calibrated_probabilities": "predictor"},
)
