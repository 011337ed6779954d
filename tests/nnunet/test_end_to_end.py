"""From images to calibrated maps with nnU-Net itself: planned, preprocessed, trained, validated and predicted by it.

Everything runs in child processes with one thread each: on a CPU the number of threads changes the rounding of a
network's outputs, and what is compared here to the voxel must have been computed alike.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import SimpleITK
from numpy.typing import NDArray

from segcal.manifest import Manifest
from tests.nnunet import nnunet_run, phantom
from tests.nnunet.folders import inside, read_probs, softmax
from tests.nnunet.untrained import read_segmentation

pytest.importorskip("nnunetv2", reason="nnunetv2 is not installed; pip install -c constraints.txt '.[nnunet]'")
pytestmark = [pytest.mark.nnunet, pytest.mark.slow]

FOLDS = tuple(range(phantom.N_FOLDS))
SEGCAL = "import sys; from segcal_cli.main import run; sys.exit(run())"
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Run:
    """Folders of one run of nnU-Net, and commands in them."""

    root: Path

    @property
    def model(self) -> Path:
        return self.root / "results" / phantom.DATASET / f"nnUNetTrainer__nnUNetPlans__{nnunet_run.CONFIGURATION}"

    @property
    def raw(self) -> Path:
        return self.root / "raw" / phantom.DATASET

    @property
    def splits(self) -> Path:
        return self.root / "preprocessed" / phantom.DATASET / "splits_final.json"

    @cached_property
    def environment(self) -> dict[str, str]:
        places = {f"nnUNet_{name}": str(self.root / name) for name in ("raw", "preprocessed", "results")}
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "nnUNet_def_n_proc": "1", "nnUNet_compile": "f"}
        return {**os.environ, **places, **threads}

    def child(self, *words: str | Path, expect: int = 0) -> subprocess.CompletedProcess[str]:
        """A Python process at the top of the repository; what it says is shown when it fails."""
        command = [sys.executable, *map(str, words)]
        done = subprocess.run(command, env=self.environment, cwd=ROOT, capture_output=True, text=True, timeout=1800)
        assert done.returncode == expect, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done

    def nnunet(self, *commands: list[str]) -> None:
        script = self.root / "commands.txt"
        script.write_text("\n".join(json.dumps(command) for command in commands))
        self.child("tests/nnunet/nnunet_run.py", "commands", script)

    def predict_command(self, out: str, folds: tuple[int, ...], *more: str) -> list[str]:
        where = ["-i", str(self.raw / "imagesTs"), "-o", str(self.root / out), "-device", "cpu"]
        which = ["-d", "901", "-c", nnunet_run.CONFIGURATION, "-f", *map(str, folds)]
        return ["nnUNetv2_predict", *which, *where, "-npp", "0", "-nps", "0", *more]

    def segcal(self, *words: str | Path, expect: int = 0) -> str:
        return self.child("-c", SEGCAL, *words, expect=expect).stderr

    def predict(self, out: str, calibrator: str) -> str:
        where = ["-i", self.raw / "imagesTs", "-o", self.root / out, "-device", "cpu"]
        return self.segcal("nnunet", "predict", "-m", self.model, *where, "--calibrator", self.root / calibrator)

    def member(self, folder: str, fold: int, case_id: str) -> tuple[NDArray[Any], tuple[slice, ...]]:
        """Exported logits and where the network predicted."""
        with np.load(self.root / folder / f"fold_{fold}" / f"{case_id}.npz") as content:
            return content["logits"], inside(content["crop"].tolist())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A trained three-fold ensemble, its cross-validation, and nnU-Net's predictions of two more cases."""
    run = Run(tmp_path_factory.mktemp("phantom"))
    phantom.write_dataset(run.root / "raw")
    run.splits.parent.mkdir(parents=True)
    run.splits.write_text(json.dumps(phantom.splits()))
    run.child("tests/nnunet/nnunet_run.py", "train", "901", str(phantom.N_FOLDS))
    singles = [run.predict_command(f"own_{fold}", (fold,), "--save_probabilities") for fold in FOLDS]
    folders = [str(run.root / f"own_{fold}") for fold in FOLDS]
    run.nnunet(
        run.predict_command("own", FOLDS),
        run.predict_command("own_saved", FOLDS, "--save_probabilities"),
        *singles,
        ["nnUNetv2_ensemble", "-i", *folders, "-o", str(run.root / "own_ensemble"), "-np", "1", "--save_npz"],
    )
    return run


@pytest.fixture(scope="module")
def fitted(run: Run) -> Run:
    """The same with calibrators fitted on the cross-validation, and segcal's predictions of the two cases."""
    words = ["--labels", run.raw / "labelsTr", "--splits", run.splits, "--out", run.root / "out_of_fold.yaml"]
    run.segcal("nnunet", "collect", run.model, *words)
    run.segcal("manifest", "check", run.root / "out_of_fold.yaml")
    for method, pooling in (("cms_ap", "logits"), ("identity", "probabilities")):
        out = run.root / f"{method}.safetensors"
        run.segcal("fit", run.root / "out_of_fold.yaml", "--method", method, "--pooling", pooling, "--out", out)
        run.predict(f"calibrated_{method}", f"{method}.safetensors")
    return run


@pytest.fixture(scope="module")
def exported(run: Run) -> Run:
    """The same with the logits of the two cases."""
    run.segcal(*export(run, "Ts"), "-o", run.root / "logits")
    return run


def export(run: Run, part: str) -> list[str | Path]:
    where = ["-i", run.raw / f"images{part}", "--labels", run.raw / f"labels{part}", "-device", "cpu"]
    return ["nnunet", "export", "-m", run.model, *where]


def half_precision(largest: float, n_members: int) -> float:
    """How far apart probabilities can be that nnU-Net's rounding of logits up to `largest` makes differ.

    nnU-Net adds the folds, divides and resamples their mean in half precision; an exported fold is resampled and
    rounded once. Probabilities move by at most half of what the logits do.
    """
    steps = n_members * np.spacing(np.float16(n_members * largest)) / n_members + 3 * np.spacing(np.float16(largest))
    return float(steps) / 2 / 2


def test_plan_is_transposed_and_images_are_resampled_and_cropped(run: Run) -> None:
    """What the comparisons below rely on to be hard."""
    plans = json.loads((run.model / "plans.json").read_bytes())
    assert plans["transpose_forward"] == [2, 0, 1]
    target = plans["configurations"][nnunet_run.CONFIGURATION]["spacing"]
    spacings = {}
    for case_id in phantom.HELD_OUT:
        image = SimpleITK.ReadImage(run.raw / "imagesTs" / f"{case_id}_0000.nii.gz")
        spacings[case_id] = image.GetSpacing()[::-1]
        assert set(np.unique(read_segmentation(run.root / "own" / f"{case_id}.nii.gz"))) == {0, 1, 2}
    assert any(not np.allclose(np.array(own)[[2, 0, 1]], target) for own in spacings.values())


def test_cross_validation_becomes_one_member_a_case(fitted: Run) -> None:
    manifest = Manifest.load(fitted.root / "out_of_fold.yaml")
    assert [case.id for case in manifest.cases] == list(phantom.TRAINING)
    assert manifest.classes == phantom.CLASSES
    assert manifest.n_members == 1
    for case in manifest.cases:
        fold = next(k for k, split in enumerate(phantom.splits()) if case.id in split["val"])
        assert f"fold_{fold}/validation" in case.members[0]
        assert case.crop is not None  # the box of the images, in image order
        assert [low for low, _ in case.crop] == [3, 3, 3]


@pytest.mark.parametrize("case_id", phantom.HELD_OUT)
def test_segmentation_is_the_file_of_nnunetv2_predict(fitted: Run, case_id: str) -> None:
    own = read_segmentation(fitted.root / "own" / f"{case_id}.nii.gz")
    ours = read_segmentation(fitted.root / "calibrated_cms_ap" / f"{case_id}.nii.gz")
    np.testing.assert_array_equal(ours, own)


@pytest.mark.parametrize("case_id", phantom.HELD_OUT)
def test_probability_pooling_is_nnunetv2_ensemble(fitted: Run, case_id: str) -> None:
    """Of maps that are not calibrated; to the rounding of float32, of which both make a few."""
    own, ours = (read_probs(fitted.root / name, case_id) for name in ("own_ensemble", "calibrated_identity"))
    np.testing.assert_allclose(ours, own, atol=1e-6, rtol=0)
    assert np.abs(own - read_probs(fitted.root / "own_saved", case_id)).max() > 0.01  # the mean of logits is another
    segmentations = [
        read_segmentation(fitted.root / name / f"{case_id}.nii.gz") for name in ("own_ensemble", "calibrated_identity")
    ]
    np.testing.assert_array_equal(*segmentations)


@pytest.mark.parametrize("case_id", phantom.HELD_OUT)
def test_softmax_of_the_mean_exported_logits_is_what_nnunet_saves(exported: Run, case_id: str) -> None:
    members = [exported.member("logits", fold, case_id) for fold in FOLDS]
    within = members[0][1]
    mean = np.mean([logits.astype(np.float64) for logits, _ in members], axis=0)
    largest = max(float(np.abs(logits[within]).max()) for logits, _ in members)
    own = read_probs(exported.root / "own_saved", case_id)
    bound = half_precision(largest, len(FOLDS))
    assert bound < 0.02
    assert np.abs(softmax(mean)[within] - own[within]).max() <= bound
    for fold, (logits, _) in enumerate(members):  # a single fold is rounded alike, and only softmax is computed twice
        alone = read_probs(exported.root / f"own_{fold}", case_id)
        np.testing.assert_allclose(softmax(logits)[within], alone[within], atol=1e-6, rtol=0)


def test_training_cases_are_refused_and_out_of_fold_they_are_the_validation(run: Run) -> None:
    refused = run.segcal(*export(run, "Tr"), "-o", run.root / "refused", expect=2)
    assert "9 of the cases were used to train fold 0, 1, 2" in refused
    assert not (run.root / "refused").exists()

    run.segcal(*export(run, "Tr"), "--out-of-fold", "-o", run.root / "out_of_fold")

    for fold, split in enumerate(phantom.splits()):
        for case_id in split["val"]:
            logits, within = run.member("out_of_fold", fold, case_id)
            saved = read_probs(run.model / f"fold_{fold}" / "validation", case_id)
            np.testing.assert_allclose(softmax(logits)[within], saved[within], atol=1e-6, rtol=0)


@pytest.mark.parametrize("case_id", phantom.HELD_OUT)
def test_postprocess_gives_what_predict_gives(fitted: Run, case_id: str) -> None:
    """The same calibrator on nnU-Net's saved probabilities: the same segmentation, maps apart by half precision."""
    out = fitted.root / "postprocessed"
    if not out.exists():
        words = ["--calibrator", fitted.root / "cms_ap.safetensors", "--out", out]
        fitted.segcal("nnunet", "postprocess", fitted.root / "own_saved", *words)
    segmentations = [read_segmentation(folder / f"{case_id}.nii.gz") for folder in (out, fitted.root / "own")]
    np.testing.assert_array_equal(*segmentations)
    apart = np.abs(read_probs(out, case_id) - read_probs(fitted.root / "calibrated_cms_ap", case_id)).max()
    assert apart < 0.01
