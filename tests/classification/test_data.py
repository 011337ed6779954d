"""Reading and writing classifier outputs: three layouts, one meaning, and everything that is refused."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest

from segcal.classification.data import data_from_arrays, load_data, write_calibrated
from segcal.errors import DataError, FileFormatError, MissingFileError

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(6, 3))
LABELS = np.array([0, 1, 2, 0, -1, 1])
OOD = np.array([0, 0, 0, 0, 1, 0])
FEATURES = RNG.normal(size=(6, 2))
SUBJECT = np.array([7, 7, 3, 3, 9, 9])
ARRAYS = {"logits": LOGITS, "labels": LABELS, "ood": OOD, "features": FEATURES, "subject": SUBJECT}


def write(folder: Path, layout: str, arrays: dict[str, np.ndarray]) -> Path:
    if layout == "npz":
        np.savez_compressed(folder / "data.npz", **arrays)
        return folder / "data.npz"
    if layout == "npy":
        (folder / "data").mkdir()
        for name, array in arrays.items():
            np.save(folder / "data" / f"{name}.npy", array)
        return folder / "data"
    words = {"logits": "logit", "probabilities": "probability", "features": "feature", "labels": "label"}
    columns: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        if array.ndim == 2:
            columns |= {f"{words[name]}_{k}": column for k, column in enumerate(array.T)}
        else:
            columns[words.get(name, name)] = array
    lines = [",".join(columns), *(",".join(str(v) for v in row) for row in zip(*columns.values(), strict=True))]
    (folder / "data.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / "data.csv"


@pytest.mark.parametrize("layout", ["npz", "npy", "csv"])
def test_the_three_layouts_hold_the_same_rows(tmp_path: Path, layout: str) -> None:
    data = load_data(write(tmp_path, layout, ARRAYS))

    assert data.layout == layout
    np.testing.assert_array_equal(data.samples.logits.numpy(), LOGITS)
    np.testing.assert_allclose(data.samples.known_features.numpy(), FEATURES, rtol=1e-6)
    assert data.samples.kind == "logits"
    assert data.ood is not None
    assert data.ood.tolist() == [False] * 4 + [True, False]
    assert data.known.known_labels.tolist() == [0, 1, 2, 0, 1]  # the foreign row and its label -1 are gone
    assert data.known_subjects is not None
    assert [data.known_subjects.tolist().count(s) for s in data.known_subjects] == [2, 2, 2, 2, 1]


def test_npz_and_npy_of_the_same_arrays_have_the_same_hash_and_other_values_another(tmp_path: Path) -> None:
    one, two = load_data(write(tmp_path, "npz", ARRAYS)), load_data(write(tmp_path, "npy", ARRAYS))
    assert one.sha256 == two.sha256 == data_from_arrays(ARRAYS).sha256
    assert data_from_arrays({**ARRAYS, "labels": LABELS[::-1].copy(), "ood": OOD[::-1].copy()}).sha256 != one.sha256


def test_the_name_says_what_the_scores_are_and_values_never_do(tmp_path: Path) -> None:
    looks_like_probabilities = np.full((4, 2), 0.5)
    data = load_data(write(tmp_path, "npz", {"logits": looks_like_probabilities}))
    assert data.samples.kind == "logits"
    np.testing.assert_array_equal(data.samples.logits.numpy(), looks_like_probabilities)
    assert data_from_arrays({"probabilities": looks_like_probabilities}).samples.kind == "probabilities"


@pytest.mark.parametrize("layout", ["npz", "npy", "csv"])
def test_calibrated_probabilities_are_written_in_the_layout_of_the_input_and_read_back_exactly(
    tmp_path: Path, layout: str
) -> None:
    data = load_data(write(tmp_path, layout, ARRAYS))
    probabilities = np.exp(LOGITS) / np.exp(LOGITS).sum(1, keepdims=True)

    place = write_calibrated(data, probabilities, tmp_path / "out")
    again = load_data(place)

    assert again.layout == layout
    assert again.samples.kind == "probabilities"
    np.testing.assert_array_equal(again.samples.logits.numpy(), np.log(probabilities))
    assert again.known.known_labels.tolist() == data.known.known_labels.tolist()
    assert again.ood is not None
    assert again.ood.tolist() == data.ood.tolist()  # type: ignore[union-attr]
    first = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*.*")}
    write_calibrated(data, probabilities, tmp_path / "out")
    assert first == {path: path.read_bytes() for path in (tmp_path / "out").rglob("*.*")}


def test_subjects_of_a_csv_may_be_any_text_and_survive(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text('probability_1,label,probability_0,subject\n0.25,0,0.75,"Doe, J"\n1,1,0,b\n')
    data = load_data(tmp_path / "d.csv")
    np.testing.assert_allclose(np.exp(data.samples.logits.numpy()), [[0.75, 0.25], [0, 1]], atol=1e-30)
    place = write_calibrated(data, np.array([[0.5, 0.5], [0.25, 0.75]]), tmp_path)
    assert place.read_text().splitlines() == [
        "probability_0,probability_1,label,subject",
        '0.5,0.5,0,"Doe, J"',
        "0.25,0.75,1,b",
    ]


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ("logit_0,logit_2,label", "no logit_1"),
        ("logit_0,logit_1,lable", "unknown column `lable`"),
        ("logit_0,logit_0,label", "two columns"),
        ("logit_0,logit_1,label,label", "two columns"),
        ("0.1,0.9,1", "unknown column `0.1`.*first line must say"),
        ("logit_0;logit_1;label", "separated by commas"),
        ("logit_0\tlogit_1\tlabel", "separated by commas"),
        (",logit_0,logit_1,label", "index column has to go"),
        ("", "no header|unknown column"),
        ("label,ood", "neither `logits` nor `probabilities`"),
        ("logit_0,probability_0,label", "both"),
    ],
)
def test_a_header_that_does_not_follow_the_convention_is_refused(tmp_path: Path, header: str, words: str) -> None:
    (tmp_path / "d.csv").write_text(header + "\n" + ",".join(["0"] * (header.count(",") + 1)) + "\n")
    with pytest.raises((FileFormatError, DataError), match=words):
        load_data(tmp_path / "d.csv")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("0.1,x,1\n", "line 2, column `logit_1`: 'x' is no number"),
        ("0.1,0.2,1\n\n0.1,0.2,\n", "line 4, column `label`: '' is no number"),
        ("0.1,0.2,1\n0.1,0.2\n", "line 3 has 2 columns, the header has 3"),
        ("", "no row"),
        ("0.1,nan,1\n", "NaN"),
        ("0.1,0.2,1.5\n", "whole numbers"),
        ("0.1,0.2,7\n", "Labels run"),
    ],
)
def test_broken_lines_of_a_csv_are_refused(tmp_path: Path, body: str, words: str) -> None:
    (tmp_path / "d.csv").write_text("logit_0,logit_1,label\n" + body)
    with pytest.raises((FileFormatError, DataError), match=words) as caught:
        load_data(tmp_path / "d.csv")
    assert "d.csv" in str(caught.value)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"logits": LOGITS, "probabilities": LOGITS}, "both"),
        ({"labels": LABELS}, "neither"),
        ({"logits": LOGITS, "labels": np.array([0, 1])}, "shape"),
        ({"logits": LOGITS, "ood": np.array([0, 1, 2, 0, 0, 0])}, "truth values"),
        ({"logits": LOGITS, "ood": np.ones(6, dtype=bool)}, "every row"),
        ({"logits": LOGITS, "subject": np.zeros(6)}, "whole numbers"),
        ({"logits": np.full((2, 2), np.inf)}, "infinity"),
        ({"probabilities": LOGITS}, "sum to 1"),
        ({"logits": np.zeros((0, 3))}, "no row"),
        ({"logits": np.zeros(4)}, "shape"),
        ({"logits": LOGITS * 1e300}, "Row 0 of the logits holds .*e\\+299, more than float32 can"),
        ({"logits": LOGITS, "labels": LABELS[:, None]}, "Take the one column"),
        ({"logits": LOGITS, "labels": np.eye(3, dtype=int)[LABELS]}, r"argmax\(1\)"),
        ({"logits": LOGITS, "features": np.zeros((6, 0))}, "with d ≥ 1"),
    ],
)
def test_arrays_that_do_not_belong_together_are_refused(
    tmp_path: Path, arrays: dict[str, np.ndarray], words: str
) -> None:
    np.savez(tmp_path / "d.npz", **arrays)
    with pytest.raises(DataError, match=words) as caught:
        load_data(tmp_path / "d.npz")
    assert "d.npz" in str(caught.value)


def test_misspelt_names_are_refused_and_the_known_ones_listed(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", logits=LOGITS, lables=LABELS)
    with pytest.raises(FileFormatError, match=r"`lables`.*known are `logits`"):
        load_data(tmp_path / "d.npz")


def test_nothing_is_unpickled_and_bombs_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "pickled.npz", logits=LOGITS, labels=np.array([{}], dtype=object))
    with pytest.raises(FileFormatError, match="never Python objects"):
        load_data(tmp_path / "pickled.npz")
    (tmp_path / "folder").mkdir()
    np.save(tmp_path / "folder" / "logits.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(FileFormatError, match=r"logits\.npy"):
        load_data(tmp_path / "folder")
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w") as archive:
        archive.writestr(
            "logits.npy",
            b"\x93NUMPY\x01\x00v\x00"
            + repr({"descr": "<f8", "fortran_order": False, "shape": (2**33, 4)}).encode().ljust(117)
            + b"\n",
        )
    with pytest.raises(FileFormatError, match="limit"):
        load_data(tmp_path / "bomb.npz")


def test_a_truncated_npy_and_a_lone_npy_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    np.save(tmp_path / "folder" / "logits.npy", LOGITS)
    whole = (tmp_path / "folder" / "logits.npy").read_bytes()
    (tmp_path / "folder" / "logits.npy").write_bytes(whole[:-8])
    with pytest.raises(FileFormatError, match=r"logits\.npy"):
        load_data(tmp_path / "folder")
    with pytest.raises(FileFormatError, match="give the folder"):
        load_data(tmp_path / "folder" / "logits.npy")
    with pytest.raises(MissingFileError):
        load_data(tmp_path / "nothing.npz")


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"probabilities": 1.02 * np.full((4, 2), 0.5)}, "sums off by 0.02.*divide every row by its own"),
        (
            {"logits": np.zeros((4, 2)), "features": np.array([[0.0], [1.0], [np.nan], [2.0]])},
            r"Row 2 of the features holds NaN or infinity \(1 such rows\)",
        ),
    ],
)
def test_the_error_names_the_row_and_the_way_out(arrays: dict[str, np.ndarray], words: str) -> None:
    with pytest.raises(DataError, match=words):
        data_from_arrays(arrays)
