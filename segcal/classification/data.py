"""Files of classifier outputs: an .npz, a folder of .npy files, or a CSV, with the same names for the same things.

| array | shape | CSV columns | needed |
|---|---|---|---|
| `logits` or `probabilities` | (n, C) float | `logit_0`, … or `probability_0`, … | one; the name says which |
| `labels` | (n,) whole numbers | `label` | to fit and to evaluate |
| `features` | (n, d) float | `feature_0`, … | by methods that look at them |
| `ood` | (n,) truth values or 0/1 | `ood` | no; rows that belong to no class, whose label is ignored |
| `subject` | (n,) whole numbers (CSV: any text) | `subject` | no; rows of one subject are resampled together |

Nothing is guessed from values and any other name is refused: a misspelt `lables` must not pass for "no labels".
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from segcal.classification.csv_table import read_csv_arrays, write_csv_arrays
from segcal.classification.samples import Samples
from segcal.errors import DataError, FileFormatError, MissingFileError, OutputError
from segcal.io.archive import DEFAULT_LIMIT_BYTES, open_npz, write_npz
from segcal.io.atomic import atomic_write
from segcal.types import Kind

Layout: TypeAlias = Literal["npz", "npy", "csv"]
AnyArray: TypeAlias = NDArray[Any]

KINDS: tuple[Kind, ...] = ("logits", "probabilities")
NAMES = (*KINDS, "labels", "features", "ood", "subject")
CARRIED = ("labels", "ood", "subject")
"""What is copied beside calibrated probabilities."""


@dataclass(frozen=True, slots=True, eq=False)
class ScoreData:
    """What a file holds, checked.

    Attributes:
        name: of the file, for messages and reports.
        samples: all rows, foreign ones included; their labels are 0 and mean nothing.
        ood: (n,) bool, rows that belong to no class; None when the file does not say.
        subjects: (n,) int64, rows with the same number are resampled together; None when the file does not say.
        layout: how it is stored.
        carried: the arrays of CARRIED as they were read.
        sha256: of names, shapes, types and values; the same for .npz and .npy.
    """

    name: str
    samples: Samples
    ood: NDArray[np.bool_] | None
    subjects: NDArray[np.int64] | None
    layout: Layout
    carried: Mapping[str, AnyArray]
    sha256: str

    @property
    def known(self) -> Samples:
        """The rows that belong to a class: those to fit on and to measure calibration with."""
        return self.samples if self.ood is None else self.samples.rows(torch.as_tensor(~self.ood, device="cpu"))

    @property
    def known_subjects(self) -> NDArray[np.int64] | None:
        """(known row,) subject of each."""
        return self.subjects if self.subjects is None or self.ood is None else self.subjects[~self.ood]


def load_data(path: str | Path) -> ScoreData:
    """Read a file or a folder of .npy files.

    Raises:
        MissingFileError: there is nothing at `path`.
        FileFormatError: it is not one of the three layouts, is damaged, or has names this module does not know.
        DataError: the arrays do not belong together or hold values no calibration can start from.
    """
    place = Path(path)
    if not place.exists():
        raise MissingFileError(f"{place}: not there; expected an .npz, a .csv or a folder of .npy files.")
    layout, arrays = _read(place)
    try:
        return _checked(place.name, layout, arrays)
    except DataError as error:
        raise DataError(f"{place}: {error}") from None


def data_from_arrays(arrays: Mapping[str, AnyArray], *, name: str = "arrays") -> ScoreData:
    """The same from arrays in memory, under the same names."""
    unknown = [key for key in arrays if key not in NAMES]
    if unknown:
        raise DataError(f"unknown array `{unknown[0]}`; known are {_listed(NAMES)}")
    return _checked(name, "npz", {key: np.asarray(array) for key, array in arrays.items()})


def write_calibrated(data: ScoreData, probabilities: AnyArray, folder: Path) -> Path:
    """Write calibrated probabilities into `folder` in the layout they were read in, float64, with what is carried.

    Returns:
        The file, or for .npy the folder, that `segcal classify evaluate` reads again.
    """
    arrays = {"probabilities": np.ascontiguousarray(probabilities, dtype=np.float64), **data.carried}
    if data.layout == "npy":
        place = folder / "calibrated"
        for key, array in arrays.items():
            with atomic_write(place / f"{key}.npy") as temporary, temporary.open("wb") as file:
                np.save(file, array, allow_pickle=False)
        return place
    place = folder / f"calibrated.{data.layout}"
    with atomic_write(place) as temporary:
        if data.layout == "npz":
            write_npz(temporary, arrays)
        else:
            write_csv_arrays(temporary, arrays)
    return place


def check_not_input(data: Path, out: Path) -> None:
    """Refuse to write calibrated probabilities over what they are made of."""
    written = [out / "calibrated.npz", out / "calibrated.csv", out / "calibrated"]
    if any(path.exists() and path.samefile(data) for path in written if data.exists()):
        raise OutputError(f"{out}: the result would replace its own input {data}; choose another --out.")


def _read(place: Path) -> tuple[Layout, dict[str, AnyArray]]:
    if place.is_dir():
        return "npy", _read_folder(place)
    if place.suffix == ".npz":
        return "npz", _read_npz(place)
    if place.suffix == ".csv":
        return "csv", read_csv_arrays(place)
    if place.suffix == ".npy":
        raise FileFormatError(
            f"{place}: one .npy file holds one array. Put logits.npy or probabilities.npy, labels.npy and so on into "
            "a folder and give the folder."
        )
    raise FileFormatError(f"{place}: expected an .npz, a .csv or a folder of .npy files, found `{place.suffix}`.")


def _read_npz(path: Path) -> dict[str, AnyArray]:
    with open_npz(path) as reader:
        _check_names(path, list(reader.entries), "keys")
        return {key: reader.array(key) for key in reader.entries}


def _read_folder(folder: Path) -> dict[str, AnyArray]:
    paths = sorted(folder.glob("*.npy"))
    if not paths:
        raise FileFormatError(f"{folder}: no .npy file in this folder; expected logits.npy or probabilities.npy.")
    _check_names(folder, [path.stem for path in paths], ".npy files")
    return {path.stem: _read_npy(path) for path in paths}


def _read_npy(path: Path) -> AnyArray:
    try:
        # Memory-mapped first: a header that declares more than the file holds fails before anything is allocated.
        mapped = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(mapped, np.ndarray) or mapped.dtype.kind not in "biuf":
            raise FileFormatError(f"{path}: expected one array of plain numbers.")
        if mapped.nbytes > DEFAULT_LIMIT_BYTES:
            raise FileFormatError(f"{path}: {mapped.nbytes:,} bytes, more than the limit of {DEFAULT_LIMIT_BYTES:,}.")
        return np.array(mapped)
    except (ValueError, EOFError, OSError, SyntaxError) as error:
        if isinstance(error, FileFormatError):
            raise
        raise FileFormatError(f"{path}: not a readable .npy file of plain numbers ({error}).") from None


def _check_names(place: Path, names: list[str], what: str) -> None:
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise FileFormatError(f"{place}: unknown {what} {_listed(unknown)}; known are {_listed(NAMES)}.")


def _checked(name: str, layout: Layout, arrays: Mapping[str, AnyArray]) -> ScoreData:
    kind = _kind(arrays)
    scores = torch.as_tensor(np.ascontiguousarray(arrays[kind]), device="cpu")
    n = len(scores) if scores.ndim else 0
    ood = _ood(arrays["ood"], n) if "ood" in arrays else None
    subjects = _subjects(arrays["subject"], n) if "subject" in arrays else None
    labels = _labels(arrays["labels"], ood, n) if "labels" in arrays else None
    features = torch.as_tensor(np.ascontiguousarray(arrays["features"]), device="cpu") if "features" in arrays else None
    samples = Samples.of(scores, labels, features, kind=kind)
    if not n:
        raise DataError("there is no row in it")
    if ood is not None and ood.all():
        raise DataError("every row is marked `ood`: nothing is left to calibrate or to measure")
    carried = {key: arrays[key] for key in CARRIED if key in arrays}
    return ScoreData(name, samples, ood, subjects, layout, carried, _sha256(arrays))


def _kind(arrays: Mapping[str, AnyArray]) -> Kind:
    found = [kind for kind in KINDS if kind in arrays]
    if len(found) != 1:
        what = (
            "both `logits` and `probabilities`"
            if found
            else f"neither `logits` nor `probabilities`, only {_listed(arrays)}"
        )
        raise DataError(f"holds {what}; exactly one of them is needed")
    return found[0]


def _ood(values: AnyArray, n: int) -> NDArray[np.bool_]:
    if values.shape != (n,) or not np.isin(values, (0, 1)).all():
        raise DataError(f"`ood` must be ({n},) truth values (0 or 1), got {values.dtype} of shape {values.shape}")
    return values.astype(np.bool_)


def _subjects(values: AnyArray, n: int) -> NDArray[np.int64]:
    if values.shape != (n,) or values.dtype.kind == "f":
        raise DataError(f"`subject` must be ({n},) whole numbers, got {values.dtype} of shape {values.shape}")
    return np.asarray(np.unique(values, return_inverse=True)[1], dtype=np.int64)


def _labels(values: AnyArray, ood: NDArray[np.bool_] | None, n: int) -> torch.Tensor:
    if values.dtype.kind == "f" and np.isfinite(values).all() and (values == np.rint(values)).all():
        values = values.astype(np.int64)  # CSV and some exporters write 3.0 for 3
    if values.dtype.kind == "u":
        values = values.astype(np.int64)
    if ood is not None and values.shape == (n,) and values.dtype.kind == "i":
        values = np.where(ood, 0, values)
    return torch.as_tensor(np.ascontiguousarray(values), device="cpu")


def _sha256(arrays: Mapping[str, AnyArray]) -> str:
    digest = hashlib.sha256()
    for key in sorted(arrays):
        array = np.ascontiguousarray(arrays[key])
        digest.update(f"{key} {array.dtype.str} {array.shape}\n".encode())
        digest.update(array.tobytes() if array.dtype.kind == "U" else array.data)
    return digest.hexdigest()


def _listed(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names)
