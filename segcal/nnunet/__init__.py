"""nnU-Net at the edge: its folders read without it, its predictor wrapped where it is installed.

Importing this package imports nothing of nnU-Net. `postprocess` and `collect` work on files alone and need no nnunetv2;
`export`, `predict`, `hook` and `CalibratedPredictor` need the extra `nnunet` and import it when they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from segcal.nnunet.hook import calibrated_export
    from segcal.nnunet.predictor import CalibratedPredictor, calibrated_probabilities

__all__ = ["CalibratedPredictor", "calibrated_export", "calibrated_probabilities"]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{'hook' if name == 'calibrated_export' else 'predictor'}"), name)
