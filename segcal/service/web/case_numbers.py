"""The numbers of a case as tables: one for the case, one for its classes, as qa.html shows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from segcal.qa.settings import QaSettings
from segcal.report.wording import DASH
from segcal.service.model import NewCase
from segcal.service.web.wording import SCORE_WORDS, percent, signed


@dataclass(frozen=True, slots=True)
class NumberLine:
    """One number of a case.

    Attributes:
        name: what it is.
        text: its value.
        limit: when it is flagged, in words.
        note: why there is no value.
        flagged: whether it lies beyond the limit.
    """

    name: str
    text: str
    limit: str
    note: str
    flagged: bool


def case_lines(case: NewCase, limits: QaSettings) -> list[NumberLine]:
    """The numbers of the whole case, each beside the limit that flags it."""
    shares = (
        ("expected DSC", "expected_dsc", case.expected_dsc, limits.min_expected_dsc, "below"),
        (
            "confidence near the boundary",
            "boundary_confidence",
            case.boundary_confidence,
            limits.min_boundary_confidence,
            "below",
        ),
        ("Dice between members", "member_dice", case.member_dice, limits.min_member_dice, "below"),
        ("member disagreement near the boundary", "disagreement", case.disagreement, limits.max_disagreement, "above"),
    )
    reasons = case.numbers.get("undefined") or {}
    found = []
    for name, key, value, limit, side in shares:
        words = DASH if limit is None else f"{side} {percent(limit, 0)} %"
        text = DASH if value is None else f"{percent(value)} %"
        beyond = value is not None and limit is not None and (value < limit if side == "below" else value > limit)
        found.append(NumberLine(name, text, words, str(reasons.get(key, "")), beyond))
    return found + _scores(case, limits, reasons)


def _scores(case: NewCase, limits: QaSettings, reasons: Mapping[str, Any]) -> list[NumberLine]:
    limit = limits.max_outlyingness
    scores = (
        ("z:free_energy_mean", case.z_free_energy),
        ("z:free_energy_std", case.z_free_energy_std),
        ("z:confidence_mean", case.z_confidence),
    )
    return [
        NumberLine(
            f"{SCORE_WORDS[key]}, z against the calibration cases",
            signed(value),
            DASH if limit is None else f"|z| above {limit:g}",
            str(reasons.get(key, "")),
            value is not None and limit is not None and abs(value) > limit,
        )
        for key, value in scores
    ]


CLASS_HEADINGS = (
    "class",
    "expected DSC (%)",
    "segmented volume",
    "expected volume",
    "expected by single members",
    "member Dice (%)",
)


def class_rows(numbers: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """One row a foreground class or region."""
    prefix = "expected_dsc:"
    names = [name.removeprefix(prefix) for name in numbers if name.startswith(prefix)]
    return [_class_row(name, numbers) for name in names]


def _class_row(name: str, numbers: Mapping[str, Any]) -> tuple[str, ...]:
    def number(key: str) -> float | None:
        value = numbers.get(f"{key}:{name}")
        return None if value is None else float(value)

    hard, expected, ml = number("volume_voxels"), number("expected_volume_voxels"), number("volume_ml")
    low, high = number("member_volume_low"), number("member_volume_high")
    # What a voxel holds is only known where the job knew the geometry, and only seen where there is volume.
    expected_ml = number("expected_volume_ml")
    per_voxel = expected_ml / expected if expected_ml is not None and expected else None
    members = DASH if low is None or high is None else f"{_volume(low, per_voxel)} to {_volume(high, per_voxel)}"
    segmented = _volume(hard, per_voxel) if ml is None or hard is None else f"{ml:,.3f} ml"
    return (
        name,
        percent(number("expected_dsc")),
        segmented,
        _volume(expected, per_voxel),
        members,
        percent(number("member_dice")),
    )


def _volume(voxels: float | None, ml: float | None) -> str:
    if voxels is None:
        return DASH
    return f"{voxels:,.1f} voxels" if ml is None else f"{voxels * ml:,.3f} ml"
