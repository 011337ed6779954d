"""Training losses for calibrated networks: `make_loss(name)(logits, labels)`, dense or plain rows alike.

Logits are (n, C, *spatial), labels (n, *spatial) or (n, 1, *spatial); see `CalibrationLoss` for what all of them
promise and docs/training_losses.md for formulas, defaults and costs.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from segcal.classification.losses.accuracy_uncertainty import AvUC, AvUCStopped, SoftAvUC
from segcal.classification.losses.aurc import AURC
from segcal.classification.losses.base import CalibrationLoss
from segcal.classification.losses.composite import Composite
from segcal.classification.losses.cross_entropy import CrossEntropy
from segcal.classification.losses.dual_focal import DualFocal, DualFocalReleased
from segcal.classification.losses.focal import Focal, FocalFiveThree
from segcal.classification.losses.interleaved import EpochLosses, held_out_split, interleaved_epoch
from segcal.classification.losses.inverse_focal import InverseFocal
from segcal.classification.losses.kde import KDECrossEntropy, KernelCalibrationError
from segcal.classification.losses.low_confidence import LowConfidenceAURC
from segcal.classification.losses.mmce import MMCE, WeightedMMCE
from segcal.classification.losses.regions import BinaryRegions
from segcal.classification.losses.soft_ece import SoftBinnedECE, SoftLabelBinnedECE
from segcal.errors import ParameterError, UsageError

__all__ = ["LOSSES", "BinaryRegions", "CalibrationLoss", "Composite", "EpochLosses", "held_out_split"]
__all__ += ["interleaved_epoch", "make_loss"]

LOSSES: dict[str, type[CalibrationLoss] | type[Composite]] = {
    "ce": CrossEntropy,
    "focal": Focal,
    "fl53": FocalFiveThree,
    "inverse_focal": InverseFocal,
    "dual_focal": DualFocal,
    "dual_focal_released": DualFocalReleased,
    "aurc": AURC,
    "au_p": LowConfidenceAURC,
    "kde_xe": KDECrossEntropy,
    "kde_ce": KernelCalibrationError,
    "mmce_m": MMCE,
    "mmce_w": WeightedMMCE,
    "avuc": AvUC,
    "avuc_gs": AvUCStopped,
    "s_avuc": SoftAvUC,
    "sb_ece": SoftBinnedECE,
    "sb_ece_lb": SoftLabelBinnedECE,
}


def make_loss(name: str, **options: Any) -> nn.Module:
    """The loss of that name; options are those of its class.

    Raises:
        UsageError: no such loss.
        ParameterError: no such option, or a value out of range.
    """
    if name not in LOSSES:
        raise UsageError(f"loss {name!r} does not exist; expected one of {', '.join(LOSSES)}")
    try:
        return LOSSES[name](**options)
    except TypeError as error:
        raise ParameterError(f"loss {name}: {error}") from None
