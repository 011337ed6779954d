"""The results folder of `segcal evaluate` or `segcal study`, as a report reads it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from segcal.errors import FileFormatError, MissingFileError, SegcalError
from segcal.evaluation.pictures import CasePicture
from segcal.evaluation.records import BINS_FILE, CASES_FILE, Records
from segcal.io.archive import read_npz_array, read_npz_header

SUMMARY_FILE, PICTURES = "summary.json", "pictures"
_NEEDED = ("pipelines", "differences", "n_cases", "n_repeats", "n_bootstrap", "settings")


@dataclass(frozen=True, slots=True, eq=False)
class Results:
    """Everything a report is made of.

    Attributes:
        folder: where it lies.
        summary: the content of summary.json.
        records: the per-case table with its bin tables.
        digests: file name -> SHA-256, so that a page can be traced to the numbers it shows.
    """

    folder: Path
    summary: Mapping[str, Any]
    records: Records
    digests: Mapping[str, str]

    @property
    def n_subjects(self) -> int:
        """Patients, or cases where the manifest names no subjects: what can be called independent."""
        return len({row.subject for row in self.records.rows})

    @property
    def overlapping(self) -> bool:
        """Whether a subject is in the test set of more than one repeat."""
        pairs = {(row.repeat, row.subject) for row in self.records.rows}
        return len(pairs) > self.n_subjects

    def picture(self, case_id: str) -> CasePicture | str | None:
        """The kept slice of a case; the reason when its file cannot be read, None when there is no file."""
        path = self.folder / PICTURES / f"{case_id}.npz"
        if path.parent != self.folder / PICTURES or not path.is_file():
            return None
        try:
            return CasePicture.from_arrays({name: read_npz_array(path, name) for name in read_npz_header(path)})
        except SegcalError as error:
            return str(error)
        except (KeyError, TypeError, ValueError) as error:
            return f"{path}: not a picture of `segcal evaluate` ({error!r})"


def load_results(folder: Path) -> Results:
    """Read summary.json, cases.csv and bins.npz.

    Raises:
        MissingFileError: One of them is not there.
        FileFormatError: One of them is not what `segcal evaluate` writes.
    """
    summary = read_summary(folder / SUMMARY_FILE)
    for name in (CASES_FILE, BINS_FILE):
        if not (folder / name).is_file():
            raise MissingFileError(
                f"{folder / name}: not there, but {SUMMARY_FILE} is; evaluate again into a new folder"
            )
    records = Records.load(folder)
    unknown = {p["name"] for p in summary["pipelines"]} ^ set(records.pipelines)
    if unknown:
        raise FileFormatError(
            f"{folder}: {SUMMARY_FILE} and {CASES_FILE} do not name the same pipelines ({', '.join(sorted(unknown))}); "
            "they are of different runs. Evaluate again into a new folder."
        )
    names = (SUMMARY_FILE, CASES_FILE, BINS_FILE)
    digests = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}
    return Results(folder, summary, records, digests)


def read_summary(path: Path) -> dict[str, Any]:
    """summary.json, with the keys every report needs."""
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise FileFormatError(f"{path}: not JSON ({error}); `segcal evaluate` writes it") from None
    missing = [key for key in _NEEDED if key not in summary] if isinstance(summary, dict) else list(_NEEDED)
    if missing:
        raise FileFormatError(f"{path}: no `{missing[0]}` in it; expected the summary of `segcal evaluate` or `study`")
    for pipeline in summary["pipelines"]:
        if not isinstance(pipeline, dict) or not {"name", "metrics"} <= set(pipeline):
            raise FileFormatError(f"{path}: a pipeline without `name` or `metrics`; evaluate again")
    assert isinstance(summary, dict)
    return summary
