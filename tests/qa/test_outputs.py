"""What QA leaves behind: tables, the page and its pictures."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from segcal.apply import apply_calibrator
from segcal.manifest import Manifest
from segcal.qa import QaSettings, run_qa
from tests.apply_data import CPU, rotated, temperature, write_manifest
from tests.qa.batches import blob

CASES = {"good": [blob(0), blob(1)], "poor": [blob(2, sharp=0.1, noise=1.0), blob(3, sharp=0.1, noise=1.0)]}


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return write_manifest(tmp_path, CASES, affine=rotated())


@pytest.fixture
def folder(manifest: Manifest) -> Path:
    """The applied results of the two cases."""
    apply_calibrator(temperature(1.0), manifest, manifest.root / "applied", device=CPU)
    return manifest.root / "applied"


def test_tables_hold_every_number_and_leave_undefined_ones_empty(folder: Path, tmp_path: Path) -> None:
    (folder / "good.npz").write_bytes(b"")
    result = run_qa(folder)
    result.save(tmp_path / "qa")
    rows = list(csv.DictReader((tmp_path / "qa" / "qa.csv").read_text(encoding="utf-8").splitlines()))
    assert [(row["case"], row["status"]) for row in rows] == [("poor", "ok"), ("good", "failed")]
    assert float(rows[0]["expected_dsc"]) == result.cases[0].case.expected_dsc
    assert rows[0]["member_dice"] == rows[0]["z:free_energy_mean"] == ""
    assert "good.npz" in rows[1]["error"]
    values = json.loads((tmp_path / "qa" / "qa.json").read_text(encoding="utf-8"))
    (case,) = values["cases"]
    assert case["member_dice"] is None
    assert "manifest" in case["undefined"]["member_dice"]
    assert {flag["code"] for flag in case["flags"]} == set(rows[0]["flags"].split(";"))
    assert (values["n_cases"], values["n_failed"], values["n_flagged"]) == (2, 1, 1)
    assert values["settings"]["min_expected_dsc"] == 0.8
    for name, text in rows[0].items():
        if text and name in case and name not in ("case", "flags"):
            assert float(text) == case[name], name


def test_the_same_batch_gives_the_same_bytes(manifest: Manifest, tmp_path: Path) -> None:
    for name in ("one", "two"):
        run_qa(manifest, calibrator=temperature(1.0)).save(tmp_path / name)
    for name in ("qa.csv", "qa.json", "qa.html"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_the_page_stands_alone_and_shows_the_flagged_cases(manifest: Manifest, tmp_path: Path) -> None:
    result = run_qa(manifest, calibrator=temperature(1.0))
    result.save(tmp_path)
    page = (tmp_path / "qa.html").read_text(encoding="utf-8")
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#)""", page)
    assert list(result.pictures) == [each.case.case_id for each in result.flagged]
    assert page.count("<img ") == len(result.pictures) > 0
    for picture in result.pictures.values():
        assert picture.alt.split(",")[0] in page
        assert "Segmented classes: " in picture.alt
    for flag in result.cases[0].flags:
        assert flag.text.split(" <")[0].split(" >")[0] in page
    assert page.index("poor</button>") < page.index("good</button>")
    assert "prefers-color-scheme: dark" in page


def test_names_cannot_put_markup_into_the_page(tmp_path: Path) -> None:
    bad = "<script>alert('$x')</script>"
    manifest = write_manifest(tmp_path, CASES, classes=("background", bad, "_b&b"), name=bad)
    fitted = temperature(1.0, classes=("background", bad, "_b&b"))
    (tmp_path / "member_0" / "good.npz").write_bytes(b"")
    result = run_qa(manifest, calibrator=fitted)
    result.save(tmp_path / "qa")
    page = (tmp_path / "qa" / "qa.html").read_text(encoding="utf-8")
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page
    assert page.count("<script>") == 1


def test_only_the_worst_cases_keep_a_picture(tmp_path: Path) -> None:
    cases = {f"c{k}": [blob(k, sharp=0.05 * (k + 1), noise=1.0)] for k in range(5)}
    manifest = write_manifest(tmp_path, cases)
    result = run_qa(manifest, calibrator=temperature(1.0), settings=QaSettings(max_pictures=2))
    assert len(result.flagged) > 2
    assert set(result.pictures) == {each.case.case_id for each in result.cases[:2]}
    assert not run_qa(manifest, calibrator=temperature(1.0), settings=QaSettings(max_pictures=0)).pictures


def test_an_image_that_does_not_fit_is_no_reason_to_give_up(folder: Path, tmp_path: Path) -> None:
    images = tmp_path / "pictures"
    images.mkdir()
    nib.save(nib.Nifti1Image(np.zeros((2, 2, 2), dtype=np.uint8), np.eye(4)), images / "poor_0000.nii.gz")
    (images / "good_0000.nii.gz").write_bytes(b"broken")
    result = run_qa(folder, images=images, settings=QaSettings(min_expected_dsc=1.0))
    assert set(result.pictures) == {"poor", "good"}
    assert not result.failed
