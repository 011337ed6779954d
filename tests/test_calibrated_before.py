"""What segcal has calibrated is not calibrated a second time unless somebody insists."""

from __future__ import annotations

from pathlib import Path

import pytest

from segcal.apply import apply_calibrator
from segcal.applying.folders import manifest_of_folders
from segcal.applying.stored import MapFormat
from segcal.checks.calibrated_before import calibrated_folder
from segcal.errors import MismatchError
from segcal.manifest_scan import scan
from tests.apply_data import CLASSES, CPU, make_fitted, random_logits, rotated, temperature, write_manifest


@pytest.mark.parametrize(("format", "below"), [("nnunet", ""), ("nifti", "probabilities")])
def test_maps_of_apply_are_refused_as_members(tmp_path: Path, format: MapFormat, below: str) -> None:
    manifest = write_manifest(tmp_path, {"a": [random_logits(0)], "b": [random_logits(1)]}, affine=rotated())
    fitted = temperature(2.0)
    apply_calibrator(fitted, manifest, tmp_path / "once", device=CPU, format=format)
    maps = tmp_path / "once" / below
    again = scan([maps], kind="probabilities", out=tmp_path / "again.yaml", classes=CLASSES).manifest

    with pytest.raises(MismatchError, match=r"holds maps that segcal has calibrated; a second .*--force"):
        apply_calibrator(fitted, again, tmp_path / "twice", device=CPU)
    assert not (tmp_path / "twice").exists()
    run = apply_calibrator(fitted, again, tmp_path / "twice", device=CPU, force=True)
    assert any("done because of --force" in text for text in run.warnings)


def test_a_pooled_ensemble_is_not_yet_calibrated(tmp_path: Path) -> None:
    """`apply` with `identity` makes one file of the members of a case, to be calibrated like a single model's."""
    manifest = write_manifest(tmp_path, {"a": [random_logits(0), random_logits(1)]}, affine=rotated())
    apply_calibrator(make_fitted("identity"), manifest, tmp_path / "pooled", device=CPU)
    pooled = scan([tmp_path / "pooled"], kind="probabilities", out=tmp_path / "pooled.yaml", classes=CLASSES).manifest
    assert apply_calibrator(temperature(2.0), pooled, tmp_path / "once", device=CPU).done == ["a"]


def test_predictions_of_a_network_are_taken_whatever_lies_beside_them(tmp_path: Path) -> None:
    logits = {"a": [random_logits(0)]}
    manifest = write_manifest(tmp_path, logits, kind="probabilities", affine=rotated())
    folder = manifest.resolve(manifest.cases[0].members[0]).parent
    for content in ("{", "[]", '{"run": "something else"}'):
        (folder / "run.json").write_text(content, encoding="utf-8")
        assert calibrated_folder(manifest) is None
    (folder / "run.json").unlink()
    (folder / "segcal_predict.json").write_text('{"calibrator_sha256": "0"}', encoding="utf-8")
    assert calibrated_folder(manifest) == folder
    with pytest.raises(MismatchError, match="calibrated"):
        temperature(2.0).check_compatible(manifest_of_folders(temperature(2.0), [folder]).manifest, "logits")
