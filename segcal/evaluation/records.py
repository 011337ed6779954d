"""The per-case table: one record per repeat, pipeline and case. Everything reported later comes from it."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segcal.errors import FileFormatError, MissingFileError
from segcal.io.archive import read_npz_array, read_npz_header, write_npz
from segcal.io.atomic import atomic_write, write_text_atomic
from segcal.metrics.bootstrap import CaseScores

CASES_FILE, BINS_FILE = "cases.csv", "bins.npz"
KEYS = ("repeat", "pipeline", "case", "subject", "group")
ACE_TABLE = "top_label_{}"


@dataclass(frozen=True, slots=True, eq=False)
class CaseRecord:
    """One case under one pipeline in one repeat.

    Attributes:
        subject: what is resampled together, `subject:<name>` or `case:<id>` (`ManifestCase.subject_key`).
        values: column -> number, NaN where undefined.
        tables: name -> (channel, ...) bin table.
    """

    repeat: int
    pipeline: str
    case: str
    subject: str
    group: str
    values: Mapping[str, float]
    tables: Mapping[str, NDArray[np.float64]]


@dataclass(frozen=True, slots=True, eq=False)
class Records:
    """All records of a run, ordered by repeat, pipeline and case."""

    rows: tuple[CaseRecord, ...]

    @property
    def pipelines(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.pipeline for row in self.rows))

    @property
    def repeats(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(row.repeat for row in self.rows))

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for row in self.rows for name in row.values))

    @property
    def groups(self) -> tuple[str, ...]:
        """Groups worth a table of their own: none when all cases belong to one."""
        named = tuple(sorted({row.group for row in self.rows if row.group}))
        return named if len(named) > 1 else ()

    def of_group(self, group: str) -> Records:
        """Only the cases of one group."""
        return Records(tuple(row for row in self.rows if row.group == group))

    def scores(self, columns: Sequence[str], *, ace_bins: int) -> CaseScores:
        """The arrays the bootstrap works on."""
        subjects, values, tables = [], [], []
        for repeat in self.repeats:
            by_pipeline = [
                [row for row in self.rows if (row.repeat, row.pipeline) == (repeat, p)] for p in self.pipelines
            ]
            subjects.append(tuple(row.subject for row in by_pipeline[0]))
            values.append(
                np.array([[[row.values.get(c, math.nan) for row in rows] for c in columns] for rows in by_pipeline])
            )
            name = ACE_TABLE.format(ace_bins)
            tables.append(np.array([[row.tables[name] for row in rows] for rows in by_pipeline]))
        return CaseScores(self.pipelines, tuple(columns), tuple(subjects), tuple(values), tuple(tables))

    def table(self, name: str, pipeline: str) -> NDArray[np.float64]:
        """A bin table of a pipeline, summed over all repeats and cases."""
        return np.asarray(np.sum([row.tables[name] for row in self.rows if row.pipeline == pipeline], axis=0))

    def save(self, folder: Path) -> None:
        """Write cases.csv and bins.npz."""
        write_text_atomic(folder / CASES_FILE, self._csv())
        keys = [[row.repeat, row.pipeline, row.case] for row in self.rows]
        arrays = {
            name: np.stack([row.tables[name] for row in self.rows])
            for name in sorted({name for row in self.rows for name in row.tables})
            if len({row.tables[name].shape for row in self.rows}) == 1
        }
        arrays["rows"] = np.frombuffer(json.dumps(keys).encode(), dtype=np.uint8)
        with atomic_write(folder / BINS_FILE) as temporary:
            write_npz(temporary, arrays)

    @classmethod
    def load(cls, folder: Path) -> Records:
        """Read what `save` wrote."""
        path = folder / CASES_FILE
        if not path.is_file():
            raise MissingFileError(f"{path}: not there; `segcal evaluate` and `segcal study` write it into their --out")
        with path.open(newline="", encoding="utf-8") as file:
            lines = list(csv.DictReader(file))
        bins = folder / BINS_FILE
        arrays = {name: read_npz_array(bins, name) for name in read_npz_header(bins)}
        keys = json.loads(arrays.pop("rows").tobytes())
        if keys != [[int(line["repeat"]), line["pipeline"], line["case"]] for line in lines]:
            raise FileFormatError(f"{bins} and {path} are not of the same run; evaluate again")
        return cls(tuple(_record(line, {n: a[i] for n, a in arrays.items()}) for i, line in enumerate(lines)))

    def _csv(self) -> str:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        columns = self.columns
        writer.writerow([*KEYS, *columns])
        for row in self.rows:
            numbers = [_number(row.values.get(column, math.nan)) for column in columns]
            writer.writerow([row.repeat, row.pipeline, row.case, row.subject, row.group, *numbers])
        return text.getvalue()


def join(parts: Iterable[Records]) -> Records:
    """Records of several repeats."""
    return Records(tuple(row for part in parts for row in part.rows))


def _record(line: Mapping[str, Any], tables: Mapping[str, NDArray[np.float64]]) -> CaseRecord:
    values = {name: float(text) if text else math.nan for name, text in line.items() if name not in KEYS}
    return CaseRecord(
        int(line["repeat"]), line["pipeline"], line["case"], line["subject"], line["group"], values, tables
    )


def _number(value: float) -> str:
    """Shortest text that reads back as the same number; empty where undefined."""
    return repr(float(value)) if math.isfinite(value) else ""
