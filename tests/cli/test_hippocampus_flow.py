"""The whole way on real data through the command line: scan, check, fit, apply, audit, with the reference's figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import SimpleITK
import yaml
from numpy.typing import NDArray
from typer.testing import CliRunner

from segcal_cli.main import app


def segcal(*arguments: object) -> Any:
    """Run a command with --json and give back what it printed."""
    result = CliRunner().invoke(app, [*(str(argument) for argument in arguments), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def read_labels(path: Path) -> NDArray[np.int64]:
    """(z, y, x), by a reader that is not ours."""
    return SimpleITK.GetArrayFromImage(SimpleITK.ReadImage(path)).astype(np.int64)


def dice(found: NDArray[np.int64], truth: NDArray[np.int64]) -> float:
    """Mean over the foreground classes that occur in either map."""
    scores = []
    for label in (1, 2):
        size = (found == label).sum() + (truth == label).sum()
        if size:
            scores.append(2 * ((found == label) & (truth == label)).sum() / size)
    return float(np.mean(scores))


def test_from_folders_of_predictions_to_audited_maps(hippocampus: Path, tmp_path: Path) -> None:
    manifest, calibrator, out = tmp_path / "m.yaml", tmp_path / "cms_ap.safetensors", tmp_path / "calibrated"
    expected = json.loads((hippocampus / "reference.json").read_text())["repeats"][0]["pipelines"]["cms_ap(z)"]

    members = [option for k in range(5) for option in ("--member", hippocampus / f"member_{k}")]
    others = ["--labels", hippocampus / "labels", "--images", hippocampus / "images"]
    names = ["--classes", "background,anterior,posterior", "--name", "hippocampus"]
    scanned = segcal("manifest", "scan", *members, *others, *names, "--kind", "logits", "--out", manifest)
    assert (scanned["n_cases"], scanned["n_labelled"], scanned["n_members"]) == (60, 60, 5)
    assert scanned["unmatched"] == []

    checked = segcal("manifest", "check", manifest)
    assert (checked["n_files"], checked["counts"]) == (420, {"fatal": 0, "warning": 0, "note": 0})

    # The splits of the reference, as a user would write them below the scanned cases.
    splits = yaml.safe_load((hippocampus / "manifest.yaml").read_text())["splits"]
    manifest.write_text(manifest.read_text() + yaml.safe_dump({"splits": splits}))
    fixed = ["--lambda", "1e-3", "--mu", "1e-3", "--split", "0"]
    (fitted,) = segcal("fit", manifest, "--method", "cms_ap", *fixed, "--out", calibrator)["calibrators"]
    assert fitted["fit_nll"] == pytest.approx(expected["fit_nll_with_penalty_excluded"], rel=1e-3)
    assert fitted["file"] == str(calibrator)

    cases = splits[0]["test"]
    chosen = [option for case in cases for option in ("--case", case)]
    applied = segcal("apply", calibrator, manifest, *chosen, "--out", out, "--dtype", "float16")
    assert (sorted(applied["done"]), applied["failed"]) == (sorted(cases), {})
    assert len(cases) == 20

    nlls, dices = [], []
    for case in cases:
        members_logits = [np.load(hippocampus / f"member_{k}/{case}.npz")["logits"] for k in range(5)]
        pooled = np.mean(members_logits, axis=0, dtype=np.float32)
        stored = np.load(out / f"{case}.npz")["probabilities"]
        assert stored.dtype == np.float16
        segmentation, truth = read_labels(out / f"{case}.nii.gz"), read_labels(hippocampus / f"labels/{case}.nii.gz")
        assert (stored.argmax(0) == pooled.argmax(0)).all()  # zero flips on disk
        assert (segmentation == pooled.argmax(0)).all()
        picked = np.take_along_axis(stored.astype(np.float64), truth[None], 0)
        nlls.append(-np.log(np.maximum(picked, 2.0**-24)).mean())
        dices.append(dice(segmentation, truth))
    assert np.mean(nlls) == pytest.approx(expected["test"]["nll"], rel=2e-3)
    assert np.mean(dices) == pytest.approx(expected["test"]["dsc"], abs=1e-9)

    audited = segcal("audit", calibrator, manifest, *chosen)
    assert audited["holds"]
    assert audited["n_flips"] / audited["n_voxels"] == expected["test"]["flip"] == 0
    assert audited["shift_change"] < 1e-4
