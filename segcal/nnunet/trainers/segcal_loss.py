"""nnU-Net's trainer with the losses of `segcal.classification.losses`; importing this module imports nnU-Net.

Settings are attributes of the class, not variables of the environment: nnU-Net names the output folder after the class
and finds it again by that name for prediction, so one name has to mean one loss. In a folder of your own, named in
`nnUNet_extTrainer`:

    from segcal.nnunet.trainers.segcal_loss import nnUNetTrainerSegcalLoss

    class nnUNetTrainerFocalMMCE(nnUNetTrainerSegcalLoss):
        segcal_primary, segcal_primary_options = "focal", {"gamma": 2.0}
        segcal_secondary, segcal_beta = "mmce_w", 0.5
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from segcal.classification.losses import LOSSES, BinaryRegions, make_loss
from segcal.errors import ParameterError, UsageError
from segcal.nnunet.model import require_nnunet, silenced

require_nnunet()

with silenced():
    from nnunetv2.training.loss.deep_supervision import DeepSupervisionWrapper
    from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer


class nnUNetTrainerSegcalLoss(nnUNetTrainer):  # type: ignore[misc]  # noqa: N801  # nnunetv2 has no types; its names
    """Dice + primary + β · secondary, at every resolution of the deep supervision with nnU-Net's weights.

    Without a primary loss the primary part is nnU-Net's own cross-entropy. Region-based (sigmoid) models are taken as
    binary problems, one for each region. The ignore label is honoured. With several GPUs each computes the statistics
    of a secondary loss on its own part of the batch.

    Attributes:
        segcal_primary: name of a primary loss in the place of cross-entropy, or None.
        segcal_primary_options: its options.
        segcal_secondary: name of a loss to add, or None.
        segcal_secondary_options: its options.
        segcal_beta: β, the factor of the secondary loss. The default is ours: with 1 some secondary losses cost
            accuracy on a small problem, with 0.1 none did (docs/training_losses.md).
        segcal_dice_weight: factor of the Dice loss.
    """

    segcal_primary: ClassVar[str | None] = None
    segcal_primary_options: ClassVar[Mapping[str, Any]] = {}
    segcal_secondary: ClassVar[str | None] = None
    segcal_secondary_options: ClassVar[Mapping[str, Any]] = {}
    segcal_beta: ClassVar[float] = 0.1
    segcal_dice_weight: ClassVar[float] = 1.0

    def _build_loss(self) -> nn.Module:
        wrapped: Any = super()._build_loss()
        deep = isinstance(wrapped, DeepSupervisionWrapper)
        own = wrapped.loss if deep else wrapped
        terms = self._segcal_terms()
        own.weight_dice = self.segcal_dice_weight
        if self.segcal_primary is not None:
            own.weight_ce = 0
        self.print_to_log_file(
            f"segcal loss: {self.segcal_dice_weight:g} Dice + {self.segcal_primary or 'cross-entropy'} "
            f"{dict(self.segcal_primary_options)} + {self.segcal_beta:g} {self.segcal_secondary} "
            f"{dict(self.segcal_secondary_options)}"
        )
        total = WithTerms(own, terms)
        if not deep:
            return total
        wrapped.loss = total
        result: nn.Module = wrapped
        return result

    def _segcal_terms(self) -> list[tuple[float, nn.Module]]:
        name = type(self).__name__
        if self.segcal_primary is None and self.segcal_secondary is None:
            raise UsageError(
                f"{name} names no loss. Train with one of {', '.join(READY_MADE)}, or derive a class that sets "
                "segcal_primary or segcal_secondary (docs/training_losses.md)."
            )
        if self.segcal_beta < 0 or self.segcal_dice_weight < 0:
            raise ParameterError(f"{name}: segcal_beta and segcal_dice_weight must be >= 0")
        terms: list[tuple[float, nn.Module]] = []
        if self.segcal_primary is not None:
            kind = LOSSES.get(self.segcal_primary)
            if kind is not None and kind.role != "primary":
                raise UsageError(
                    f"{name}: {self.segcal_primary} only judges calibration and cannot replace cross-entropy. Name it "
                    "in segcal_secondary."
                )
            terms.append((1.0, self._segcal_loss(self.segcal_primary, self.segcal_primary_options)))
        if self.segcal_secondary is not None and self.segcal_beta:
            terms.append((self.segcal_beta, self._segcal_loss(self.segcal_secondary, self.segcal_secondary_options)))
        return terms

    def _segcal_loss(self, name: str, options: Mapping[str, Any]) -> nn.Module:
        labels = self.label_manager
        if labels.has_regions:
            # Marked by BinaryRegions itself; the label value of ignored voxels is gone by then.
            return BinaryRegions(make_loss(name, **options), has_ignore_channel=labels.ignore_label is not None)
        ignored = {} if labels.ignore_label is None else {"ignore_index": int(labels.ignore_label)}
        return make_loss(name, **ignored, **options)


class WithTerms(nn.Module):
    """nnU-Net's compound loss and further terms of the same output and target, each with a factor."""

    def __init__(self, own: nn.Module, terms: list[tuple[float, nn.Module]]) -> None:
        super().__init__()
        self.own = own
        self.factors = [factor for factor, _ in terms]
        self.terms = nn.ModuleList(term for _, term in terms)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        total: Tensor = self.own(output, target)
        for factor, term in zip(self.factors, self.terms, strict=True):
            total = total + factor * term(output, target)
        return total


def _ready_made() -> dict[str, type[nnUNetTrainerSegcalLoss]]:
    """A trainer for each loss with its defaults: primary ones replace cross-entropy, others are added to it."""
    found: dict[str, type[nnUNetTrainerSegcalLoss]] = {}
    for name, kind in LOSSES.items():
        if name == "ce":
            continue  # nnUNetTrainer
        key = "segcal_primary" if kind.role == "primary" else "segcal_secondary"
        attributes = {key: name, "__module__": __name__, "__doc__": f"Dice and `{name}` of segcal with its defaults."}
        found[f"nnUNetTrainerSegcal_{name}"] = type(
            f"nnUNetTrainerSegcal_{name}", (nnUNetTrainerSegcalLoss,), attributes
        )
    return found


READY_MADE = _ready_made()
# nnU-Net looks classes up as attributes of the modules in the folder.
globals().update(READY_MADE)
