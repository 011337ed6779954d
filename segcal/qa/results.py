"""What QA found in a batch, as one table: qa.csv for spreadsheets, qa.json for machines."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from segcal.io.atomic import check_folder, write_text_atomic
from segcal.io.own_files import check_replaceable
from segcal.metrics.base import Score, Undefined
from segcal.qa.case import ClassQa, QaCase
from segcal.qa.flags import Flag
from segcal.qa.settings import QaSettings
from segcal.report.encoding import EncodedPicture

CSV_FILE, JSON_FILE, PAGE_FILE = "qa.csv", "qa.json", "qa.html"
FORMAT = "segcal-qa-1"
NO_GEOMETRY = Undefined("the geometry of the case is not known")


@dataclass(frozen=True, slots=True)
class FlaggedCase:
    """A case that could be looked at, and the reasons to look closer."""

    case: QaCase
    flags: tuple[Flag, ...]

    @property
    def rank(self) -> tuple[int, float, str]:
        """Sorts the worst first: most flags, then lowest expected DSC (none at all before any)."""
        score = self.case.expected_dsc
        return -len(self.flags), -1.0 if isinstance(score, Undefined) else score, self.case.case_id

    @property
    def numbers(self) -> dict[str, Score]:
        """Every number by the name of its column."""
        case = self.case
        found: dict[str, Score] = {
            "expected_dsc": case.expected_dsc,
            "boundary_confidence": case.boundary_confidence,
            "member_dice": case.member_dice,
            "disagreement": case.disagreement,
        }
        found |= {f"z:{name}": score for name, score in case.outlyingness.items()}
        for each in case.classes:
            found |= {f"{name}:{each.name}": score for name, score in _class_numbers(each, case.voxel_ml).items()}
        return found


@dataclass(frozen=True, slots=True)
class QaResult:
    """A batch.

    Attributes:
        describe: where the cases come from and which calibrator was used.
        names: of the foreground classes or regions.
        settings: the thresholds.
        cases: worst first.
        failed: cases that could not be looked at, with the message.
        pictures: by case id, of the worst flagged cases.
        warnings: what the user should know about the match of calibrator and data.
        kept: by case id, what `keep` of `run_qa` returned; not part of the files.
    """

    describe: Mapping[str, str]
    names: tuple[str, ...]
    settings: QaSettings
    cases: tuple[FlaggedCase, ...]
    failed: Mapping[str, str]
    pictures: Mapping[str, EncodedPicture] = field(repr=False)
    warnings: tuple[str, ...] = ()
    kept: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def flagged(self) -> tuple[FlaggedCase, ...]:
        return tuple(case for case in self.cases if case.flags)

    def save(self, out: Path) -> None:
        """Write qa.csv, qa.json and qa.html into a folder."""
        from segcal.qa.page import qa_page  # here, because the page needs this class

        # qa.json first: it says whose folder this is, should the rest not be written.
        write_text_atomic(out / JSON_FILE, json.dumps(self.json(), indent=1, allow_nan=False) + "\n")
        write_text_atomic(out / CSV_FILE, self.csv())
        write_text_atomic(out / PAGE_FILE, qa_page(self))

    def csv(self) -> str:
        """One row per case, worst first, failed ones at the end; an undefined number is an empty cell."""
        columns = list(self.cases[0].numbers) if self.cases else []
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["case", "status", "n_flags", "flags", *columns, "error"])
        for each in self.cases:
            codes = ";".join(dict.fromkeys(flag.code for flag in each.flags))
            cells = ["" if isinstance(score, Undefined) else repr(score) for score in each.numbers.values()]
            writer.writerow([each.case.case_id, "ok", len(each.flags), codes, *cells, ""])
        for case_id, message in self.failed.items():
            writer.writerow([case_id, "failed", "", "", *[""] * len(columns), message])
        return text.getvalue()

    def json(self) -> dict[str, object]:
        """The same with sentences; an undefined number is null, and `undefined` says why."""
        return {
            "format": FORMAT,
            **self.describe,
            "classes": list(self.names),
            "settings": self.settings.model_dump(mode="json"),
            "n_cases": len(self.cases) + len(self.failed),
            "n_flagged": len(self.flagged),
            "n_failed": len(self.failed),
            "warnings": list(self.warnings),
            "cases": [_case_json(each) for each in self.cases],
            "failed": dict(self.failed),
        }


def check_qa_folder(out: Path) -> None:
    """Say before the work that results cannot be written into a folder, or would replace files of somebody else."""
    check_folder(out)
    names = (JSON_FILE, CSV_FILE, PAGE_FILE)
    check_replaceable(out, names, record=JSON_FILE, ours=lambda content: content.get("format") == FORMAT)


def _class_numbers(each: ClassQa, ml: float | None) -> dict[str, Score]:
    def in_ml(voxels: float) -> Score:
        return NO_GEOMETRY if ml is None else voxels * ml

    sums, spread = each.sums, each.spread
    found: dict[str, Score] = {
        "expected_dsc": sums.expected_dsc,
        "volume_voxels": float(sums.hard),
        "expected_volume_voxels": sums.expected,
        "volume_ml": in_ml(sums.hard),
        "expected_volume_ml": in_ml(sums.expected),
        "volume_gap": sums.volume_gap,
        "member_dice": each.member_dice,
    }
    if spread is None:
        columns = ("member_volume_low", "member_volume_high", "member_volume_std", "member_volume_variation")
        return found | dict.fromkeys(columns, each.member_dice)  # the reason why there is none
    return found | {
        "member_volume_low": spread.low,
        "member_volume_high": spread.high,
        "member_volume_std": spread.std,
        "member_volume_variation": spread.variation,
    }


def _case_json(each: FlaggedCase) -> dict[str, object]:
    numbers = each.numbers
    return {
        "case": each.case.case_id,
        "flags": [{"code": flag.code, "text": flag.text} for flag in each.flags],
        **{name: None if isinstance(score, Undefined) else score for name, score in numbers.items()},
        "undefined": {name: score.reason for name, score in numbers.items() if isinstance(score, Undefined)},
    }
