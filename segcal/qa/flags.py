"""Which numbers of a case make it worth a look, each with a sentence that says why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import gt, lt

from segcal.metrics.base import Score, Undefined
from segcal.qa.case import ClassQa, QaCase
from segcal.qa.settings import QaSettings
from segcal.qa.words import STATISTIC_WORDS


@dataclass(frozen=True, slots=True)
class Flag:
    """One reason to look at a case: a short code for machines, a sentence for people."""

    code: str
    text: str


def case_flags(case: QaCase, settings: QaSettings) -> tuple[Flag, ...]:
    """Every flag of a case, in a fixed order; a number that is undefined raises none but the one that says so."""
    return (*_whole(case, settings), *(flag for each in case.classes for flag in _of_class(each, settings)))


def _whole(case: QaCase, settings: QaSettings) -> Iterator[Flag]:
    if isinstance(case.expected_dsc, Undefined):
        yield Flag("nothing_segmented", "nothing is segmented")
    if words := _below(case.expected_dsc, settings.min_expected_dsc):
        yield Flag("low_expected_dsc", f"expected DSC {words}")
    if words := _below(case.boundary_confidence, settings.min_boundary_confidence):
        yield Flag("unsure_boundary", f"confidence near the boundary {words}")
    if words := _below(case.member_dice, settings.min_member_dice):
        yield Flag("low_member_dice", f"Dice between members {words}")
    if words := _above(case.disagreement, settings.max_disagreement):
        yield Flag("members_disagree", f"member disagreement near the boundary {words}")
    for name, score in case.outlyingness.items():
        if not isinstance(score, Undefined) and _above(abs(score), settings.max_outlyingness):
            words = f"{STATISTIC_WORDS[name]} is {score:+.1f} robust standard deviations from the calibration cases"
            yield Flag(f"unusual_{name}", words)


def _of_class(each: ClassQa, settings: QaSettings) -> Iterator[Flag]:
    sums = each.sums
    if words := _below(sums.expected_dsc, settings.min_class_expected_dsc):
        yield Flag("low_class_dsc", f"{each.name}: expected DSC {words}")
    gap = sums.volume_gap
    if not isinstance(gap, Undefined) and _above(abs(gap), settings.max_volume_gap):
        yield Flag("volume_gap", f"{each.name}: expected volume differs from the segmented one by {100 * gap:+.1f} %")
    if sums.hard == 0 and _above(sums.expected, settings.missed_class_voxels):
        yield Flag("missed_class", f"{each.name}: segmented nowhere, {sums.expected:.1f} voxels expected")
    if each.spread is not None and _above(each.spread.variation, settings.max_volume_variation):
        words = f"{each.spread.low:,.0f} to {each.spread.high:,.0f} voxels"
        yield Flag("volume_spread", f"{each.name}: the members expect {words}")


def _below(score: Score, limit: float | None) -> str:
    """How a score below its limit reads, `0.700 < 0.8`; empty for any other, and where there is no limit."""
    if limit is not None and not isinstance(score, Undefined) and score < limit:
        return f"{_on_its_side(score, limit, lt)} < {_exact(limit)}"
    return ""


def _above(score: Score, limit: float | None) -> str:
    """The same above its limit, `0.100 > 0.09`."""
    if limit is not None and not isinstance(score, Undefined) and score > limit:
        return f"{_on_its_side(score, limit, gt)} > {_exact(limit)}"
    return ""


def _on_its_side(score: float, limit: float, beyond: Callable[[float, float], bool]) -> str:
    """A score in three decimals, or as many more as it takes to read as beyond its limit as it is."""
    texts = (f"{score:.{digits}f}" for digits in range(3, 17))
    return next((text for text in texts if beyond(float(text), limit)), f"{score}")


def _exact(limit: float) -> str:
    """All digits: shortened, 0.99999999 would read 1."""
    return f"{float(limit)}".removesuffix(".0")
