"""qa.html: the batch on one self-contained page, worst cases first, made like the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from segcal.counted import count
from segcal.metrics.base import Score, Undefined
from segcal.qa.case import QaCase
from segcal.qa.results import FlaggedCase, QaResult
from segcal.report.case_list import CaseCell, CaseColumn
from segcal.report.cautions import Caution
from segcal.report.encoding import EncodedPicture
from segcal.report.render import render
from segcal.report.wording import DASH

COLUMNS = (
    CaseColumn("case", "open it to see its flags, volumes and a slice", False, "ascending"),
    CaseColumn("flags", "number of reasons to look at it", True, "descending"),
    CaseColumn(
        "expected DSC (%)", "mean over the segmented classes, from the calibrated probabilities", True, "ascending"
    ),
    CaseColumn("lowest class (%)", "expected DSC of the worst segmented class", True, "ascending"),
    CaseColumn("volume gap (%)", "largest |expected - segmented| / segmented volume of a class", True, "descending"),
    CaseColumn("boundary confidence (%)", "mean confidence near the predicted boundary", True, "ascending"),
    CaseColumn("member Dice (%)", "pairwise Dice between the members, mean over classes", True, "ascending"),
    CaseColumn("member disagreement (%)", "two members differ at a voxel near the boundary", True, "descending"),
    CaseColumn("outlyingness", "largest |robust z-score| against the calibration cases", True, "descending"),
)


@dataclass(frozen=True, slots=True)
class Line:
    """One case of the page; `classes` are the rows of its own small table."""

    number: int
    cells: tuple[CaseCell, ...]
    flags: tuple[str, ...]
    classes: tuple[tuple[str, ...], ...]
    scores: tuple[str, ...]
    picture: EncodedPicture | None


def qa_page(result: QaResult) -> str:
    """The text of the page; the same result gives the same text."""
    return render(
        "qa.html.j2",
        name=result.describe["name"],
        lead=f"{count(len(result.cases) + len(result.failed), 'case')} · calibrated with {result.describe['method']}"
        f" · from the {result.describe['source']}",
        n_flagged=len(result.flagged),
        n_cases=len(result.cases),
        columns=COLUMNS,
        lines=[_line(k, each, result.pictures.get(each.case.case_id)) for k, each in enumerate(result.cases)],
        cautions=_cautions(result),
        facts=_facts(result),
    )


def _line(number: int, each: FlaggedCase, picture: EncodedPicture | None) -> Line:
    case = each.case
    classes = [c.sums for c in case.classes]
    values: list[Score] = [
        case.expected_dsc,
        _extreme([c.expected_dsc for c in classes], min),
        _extreme([_absolute(c.volume_gap) for c in classes], max),
        case.boundary_confidence,
        case.member_dice,
        case.disagreement,
    ]
    cells = [CaseCell(case.case_id, case.case_id), CaseCell(str(len(each.flags)), float(len(each.flags)))]
    cells += [_percent(value) for value in values]
    cells.append(_plain(_extreme([_absolute(z) for z in case.outlyingness.values()], max)))
    scores = tuple(f"{name.replace('_', ' ')} {_signed(z)}" for name, z in case.outlyingness.items())
    flags = tuple(flag.text for flag in each.flags)
    return Line(number, tuple(cells), flags, _class_rows(case), scores, picture)


def _class_rows(case: QaCase) -> tuple[tuple[str, ...], ...]:
    rows = []
    for each in case.classes:
        sums, spread = each.sums, each.spread
        members = DASH if spread is None else f"{_volume(spread.low, case)} to {_volume(spread.high, case)}"
        dice = _percent(each.member_dice).text
        volumes = (_volume(sums.hard, case), _volume(sums.expected, case), members)
        rows.append((each.name, _percent(sums.expected_dsc).text, *volumes, dice))
    return tuple(rows)


def _volume(voxels: float, case: QaCase) -> str:
    return f"{voxels:,.1f} voxels" if case.voxel_ml is None else f"{voxels * case.voxel_ml:,.3f} ml"


def _cautions(result: QaResult) -> list[Caution]:
    found = [Caution("serious", "not readable", text) for text in result.failed.values()]
    return found + [Caution("serious", "run", text) for text in result.warnings]


def _facts(result: QaResult) -> list[tuple[str, str]]:
    facts = [("calibrator SHA-256", result.describe["calibrator_sha256"]), ("classes", ", ".join(result.names))]
    limits = {name: value for name, value in result.settings.model_dump().items() if name != "max_pictures"}
    return facts + [
        (name.replace("_", " "), "off" if value is None else f"{value:g}") for name, value in limits.items()
    ]


def _extreme(scores: Sequence[Score], choose: Callable[[list[float]], float]) -> Score:
    """The smallest or largest of the numbers that exist; the first reason when there is none."""
    values = [score for score in scores if not isinstance(score, Undefined)]
    return choose(values) if values else scores[0]


def _absolute(score: Score) -> Score:
    return score if isinstance(score, Undefined) else abs(score)


def _percent(score: Score) -> CaseCell:
    return CaseCell(DASH, None) if isinstance(score, Undefined) else CaseCell(f"{100 * score:.1f}", score)


def _plain(score: Score) -> CaseCell:
    return CaseCell(DASH, None) if isinstance(score, Undefined) else CaseCell(f"{score:.1f}", score)


def _signed(score: Score) -> str:
    return f"not defined ({score.reason})" if isinstance(score, Undefined) else f"{score:+.1f}"
