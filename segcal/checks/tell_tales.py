"""Signs of broken input that fitting, applying and measuring see in passing, and must not keep to themselves.

`segcal manifest check` looks closer; this is for whoever did not run it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from segcal.cases import CaseData
from segcal.checks.orientation import GOOD_DICE, best_turn
from segcal.checks.values import FILL_SHARE
from segcal.types import IGNORED

_STRIDE = 7
"""Every so many voxels are enough to see whether the Dice is good; odd, so that it walks through all columns."""


@dataclass(slots=True)
class TellTales:
    """What was noticed, case by case.

    Attributes:
        n_cases: Cases looked at.
        fill: Share of voxels that look like padding, by case id.
        turned: How the prediction would fit its label clearly better, by case id.
        odd: The member that lies otherwise than the others, and how, by case id.
    """

    n_cases: int = 0
    fill: dict[str, float] = field(default_factory=dict)
    turned: dict[str, str] = field(default_factory=dict)
    odd: dict[str, str] = field(default_factory=dict)

    def look(self, case: CaseData) -> None:
        """Look at one case; labels are compared where there are some."""
        self.n_cases += 1
        n_voxels = case.logits[0].numel() if case.inside is None else int(case.inside.sum())
        share = case.n_fill / max(n_voxels, 1)
        if share >= FILL_SHARE:
            self.fill[case.case_id] = share
        if case.odd_member:
            self.odd[case.case_id] = case.odd_member
        better = _better_orientation(case)
        if better is not None:
            self.turned[case.case_id] = better

    def merge(self, other: TellTales) -> None:
        """Take over what was noticed in other cases."""
        self.n_cases += other.n_cases
        self.fill |= other.fill
        self.turned |= other.turned
        self.odd |= other.odd

    def warnings(self) -> list[str]:
        """One sentence for each kind of trouble."""
        found = []
        if self.fill:
            worst = max(self.fill, key=self.fill.__getitem__)
            found.append(
                f"{self._cases(self.fill)} hold voxels of exactly (1, 0, ..., 0) or all zeros ({worst}: "
                f"{self.fill[worst]:.1%}), as padding around the predicted box does; taken as logits they are wrong. "
                "Set `crop`; `segcal manifest check` names the box"
            )
        if self.odd:
            first = next(iter(self.odd))
            found.append(
                f"{self._cases(self.odd)} have a member that lies otherwise than the others, so that their mean means "
                f"nothing ({first}: {self.odd[first]}); `segcal manifest check` names them all"
            )
        if self.turned:
            first = next(iter(self.turned))
            found.append(
                f"{self._cases(self.turned)} fit their label clearly better when turned ({first}: {self.turned[first]})"
                "; `segcal manifest check` says what to do"
            )
        return found

    def _cases(self, concerned: Mapping[str, object]) -> str:
        return f"{len(concerned)} of {self.n_cases} cases"


def _better_orientation(case: CaseData) -> str | None:
    """In words, the turn that raises the mean foreground Dice clearly; None if the case lies well or has no label."""
    truth = case.labels if case.region_labels is None else case.region_labels
    if truth is None or _mean_dice(case) >= GOOD_DICE:
        return None
    turned = best_turn(case.decision, truth, case.valid, n_classes=case.logits.shape[0])
    if turned is None or not turned.is_clear:
        return None
    return f"Dice {turned.dice:.3f} instead of {turned.as_stored:.3f} with {turned.orientation.words()}"


def _mean_dice(case: CaseData) -> float:
    """Of a part of the voxels, over the channels seen there; 1 when there is none."""
    scores = [2 * both / either for both, either in _overlaps(case) if either]
    return sum(scores) / len(scores) if scores else 1.0


def _overlaps(case: CaseData) -> Iterator[tuple[int, int]]:
    """By channel but the background, in a part of the voxels: how many are predicted and true, and the sum of both."""
    if case.region_labels is not None:
        for decided, belongs in zip(case.decision, case.region_labels, strict=True):
            predicted, true = (mask.reshape(-1)[::_STRIDE] for mask in (decided, belongs))
            yield int((predicted & true).sum()), int(predicted.sum()) + int(true.sum())
        return
    assert case.labels is not None
    n_classes = case.logits.shape[0]
    decision, labels = (values.reshape(-1)[::_STRIDE] for values in (case.decision, case.labels))
    # One table instead of four masks a class; ignored voxels are true of a class that is left out.
    seen = torch.where(labels == IGNORED, n_classes, labels).add_(decision * (n_classes + 1))
    table = torch.bincount(seen, minlength=n_classes * (n_classes + 1)).reshape(n_classes, n_classes + 1).tolist()
    for k in range(1, n_classes):
        yield table[k][k], sum(table[k]) + sum(row[k] for row in table)
