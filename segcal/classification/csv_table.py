"""Classifier outputs as CSV: one header line that says what each column is, then one line a row."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segcal.errors import FileFormatError

AnyArray = NDArray[Any]

MATRICES = {"logit": "logits", "probability": "probabilities", "feature": "features"}
COLUMNS = {"label": "labels", "ood": "ood", "subject": "subject"}
_NUMBERED = re.compile(r"(logit|probability|feature)_(0|[1-9]\d*)")
_EXAMPLE = "for example logit_0,logit_1,logit_2,label"


def read_csv_arrays(path: Path) -> dict[str, AnyArray]:
    """Arrays by their names in an .npz; numbers become float64, `subject` stays text.

    Raises:
        FileFormatError: a header that does not follow the convention, a line of another length, text for a number.
    """
    header = _header(path)
    places = _places(path, header)
    numeric = sorted(k for name, columns in places.items() if name != "subject" for k in columns)
    table = _load(path, numeric, np.float64)
    position = {column: k for k, column in enumerate(numeric)}
    arrays: dict[str, AnyArray] = {}
    for name, columns in places.items():
        if name == "subject":
            arrays[name] = _load(path, columns, np.str_)[:, 0]
        else:
            part = table[:, [position[column] for column in columns]]
            arrays[name] = part if name in MATRICES.values() else part[:, 0]
    return arrays


def write_csv_arrays(path: Path, arrays: Mapping[str, AnyArray]) -> None:
    """The inverse; numbers are written as the shortest text that reads back as the same number."""
    words = {name: word for word, name in {**MATRICES, **COLUMNS}.items()}
    header: list[str] = []
    columns: list[list[Any]] = []
    for name, array in arrays.items():
        values = _whole(array)
        if values.ndim == 2:
            header += [f"{words[name]}_{k}" for k in range(values.shape[1])]
            columns += [column.tolist() for column in values.T]
        else:
            header.append(words[name])
            columns.append(values.tolist())
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(zip(*columns, strict=True))


def _whole(array: AnyArray) -> AnyArray:
    """Labels and truth values were read as float64; they go back as whole numbers."""
    if array.ndim == 1 and array.dtype.kind in "fb":
        return array.astype(np.int64)
    return array


def _header(path: Path) -> list[str]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return [name.strip() for name in next(csv.reader(file), [])]
    except (UnicodeDecodeError, csv.Error) as error:
        raise FileFormatError(f"{path}: not a CSV in UTF-8 ({error}).") from None


def _places(path: Path, header: Sequence[str]) -> dict[str, list[int]]:
    """Array name -> its columns, in the order of their numbers."""
    numbered: dict[str, dict[int, int]] = {}
    places: dict[str, list[int]] = {}
    for k, name in enumerate(header):
        found = _NUMBERED.fullmatch(name)
        if found is not None:
            known = numbered.setdefault(found[1], {})
            if int(found[2]) in known:
                raise FileFormatError(f"{path}: two columns are called `{name}`.")
            known[int(found[2])] = k
        elif name in COLUMNS:
            if COLUMNS[name] in places:
                raise FileFormatError(f"{path}: two columns are called `{name}`.")
            places[COLUMNS[name]] = [k]
        else:
            raise FileFormatError(
                f"{path}: unknown column `{name}` in the header. {_reason(name)}Columns are logit_0, logit_1, … or "
                f"probability_0, …, and label, feature_0, …, ood, subject; {_EXAMPLE}."
            )
    for word, columns in numbered.items():
        if sorted(columns) != list(range(len(columns))):
            missing = min(set(range(max(columns))) - set(columns))
            raise FileFormatError(f"{path}: the header has {word}_{max(columns)} but no {word}_{missing}.")
        places[MATRICES[word]] = [columns[k] for k in range(len(columns))]
    if not places:
        raise FileFormatError(f"{path}: no header line; {_EXAMPLE}.")
    return places


def _reason(name: str) -> str:
    """What an unknown column most likely means."""
    if ";" in name or "\t" in name:
        return "Columns are separated by commas. "
    if _is_number(name):
        return "The first line must say what the columns are. "
    return "" if name else "An index column has to go. "


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _load(path: Path, columns: Sequence[int], dtype: Any) -> AnyArray:
    try:
        with path.open(encoding="utf-8-sig") as file:
            if not any(line.strip() for line in _after_header(file)):
                raise FileFormatError(f"{path}: no row below the header.")
            file.seek(0)
            return np.loadtxt(
                file,
                dtype=dtype,
                delimiter=",",
                comments=None,
                skiprows=1,
                usecols=list(columns),
                ndmin=2,
                quotechar='"',
            )
    except FileFormatError:
        raise
    except (ValueError, IndexError) as error:
        found = _first_fault(path, columns) or str(error)
        raise FileFormatError(
            f"{path}: {found}; below the header every line needs one number in each column."
        ) from None


def _first_fault(path: Path, columns: Sequence[int]) -> str | None:
    """The first line that is no row of numbers, in words; None where it is not one of the usual faults."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file)
        header = next(reader)
        for fields in reader:
            if fields and len(fields) != len(header):
                return f"line {reader.line_num} has {len(fields)} columns, the header has {len(header)}"
            for k in columns if fields else ():
                if not _is_number(fields[k]):
                    return f"line {reader.line_num}, column `{header[k].strip()}`: {fields[k]!r} is no number"
    return None


def _after_header(file: Any) -> Any:
    next(file, None)
    return (line for _, line in zip(range(1000), file, strict=False))
