"""Signs of broken input are told by whoever sees them, also when nobody ran `segcal manifest check`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import SimpleITK
import torch
from numpy.typing import NDArray

from segcal.apply import apply_calibrator
from segcal.checks.glance import SIDE, _places, glance
from segcal.data_hash import data_hash
from segcal.evaluation.run import evaluate
from segcal.fitting.run import fit
from segcal.io.members import Member
from segcal.io.nifti import write_nifti
from segcal.manifest import Manifest
from tests.fit_data import write_ensemble

CPU = torch.device("cpu")
SPLIT = {"calibration": [0, 1], "validation": [2]}


def sharp_ensemble(root: Path, **how: Any) -> Manifest:
    """Labels the members agree with, in a corner, so that no turned volume fits."""
    manifest = write_ensemble(root, n_cases=3, split=SPLIT, **how)
    truth = np.zeros((6, 16, 18), np.uint8)
    truth[:3, 1:7, 2:9], truth[3:5, 2:6, 10:13] = 1, 2
    for case in manifest.cases:
        assert case.label is not None
        write_nifti(root / case.label, truth, affine=np.eye(4))
    members(manifest, lambda old: 6.0 * (np.arange(old.shape[0])[:, None, None, None] == truth) + 0.01 * old)
    return manifest


def members(manifest: Manifest, change: Callable[[NDArray[Any]], NDArray[Any]]) -> None:
    for case in manifest.cases:
        for name in case.members:
            path = manifest.resolve(name)
            with np.load(path) as content:
                arrays = dict(content)
            arrays["logits"] = change(arrays["logits"]).astype(np.float32)
            np.savez_compressed(path, **arrays)


def padded(values: NDArray[Any], fill: tuple[float, ...]) -> NDArray[Any]:
    values = values.copy()
    values[:, 5:] = np.array(fill)[:, None, None, None]
    return values


def told(manifest: Manifest, tmp_path: Path) -> tuple[str, str, str]:
    """What fit, apply and evaluate say."""
    fitted = fit(manifest, method="ts", device=CPU)
    run = apply_calibrator(fitted, manifest, tmp_path / "out", device=CPU)
    measured = evaluate(manifest, [fitted], device=CPU)
    return " ".join(fitted.info.warnings), " ".join(run.warnings), " ".join(measured.summary["warnings"])


def test_sound_data_raise_no_doubt(tmp_path: Path) -> None:
    for text in told(sharp_ensemble(tmp_path), tmp_path):
        assert "(1, 0, ..., 0)" not in text
        assert "turned" not in text


@pytest.mark.parametrize("fill", [(1.0, 0.0, 0.0), (0.0, 0.0, 0.0)])
def test_padding_taken_for_logits_is_told_by_fit_apply_and_evaluate(tmp_path: Path, fill: tuple[float, ...]) -> None:
    manifest = sharp_ensemble(tmp_path)
    members(manifest, lambda values: padded(values, fill))
    by_fit, by_apply, by_evaluate = told(manifest, tmp_path)
    assert "2 of 2 cases hold voxels of exactly (1, 0, ..., 0) or all zeros (case_00: 16.7%)" in by_fit
    assert "validation: 1 of 1 cases hold" in by_fit
    assert "3 of 3 cases hold" in by_apply
    assert "3 of 3 cases hold" in by_evaluate
    assert all("`crop`" in text for text in (by_fit, by_apply, by_evaluate))


@pytest.mark.parametrize("pooling", ["logits", "probabilities"])
def test_padding_is_seen_however_members_are_pooled(tmp_path: Path, pooling: Any) -> None:
    manifest = sharp_ensemble(tmp_path)
    members(manifest, lambda values: padded(values, (1.0, 0.0, 0.0)))
    assert any("as padding" in text for text in fit(manifest, method="ts", pooling=pooling, device=CPU).info.warnings)


def test_a_turned_prediction_is_told_by_fit_and_evaluate(tmp_path: Path) -> None:
    manifest = sharp_ensemble(tmp_path)
    members(manifest, lambda values: values[:, :, :, ::-1])
    by_fit, by_apply, by_evaluate = told(manifest, tmp_path)
    assert "2 of 2 cases fit their label clearly better when turned (case_00: Dice 1.000 instead of 0." in by_fit
    assert "x flipped" in by_fit
    assert "3 of 3 cases fit their label clearly better when turned" in by_evaluate
    assert by_apply == ""  # apply reads no label


def test_the_hash_of_the_data_follows_their_content_and_not_their_place(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    manifest = sharp_ensemble(tmp_path / "a")
    before = data_hash(manifest)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    moved = Manifest.load(tmp_path / "b" / manifest.path.name)
    assert data_hash(moved) == before
    assert data_hash(manifest, ["case_01", "case_00"]) == data_hash(manifest, ["case_00", "case_01"]) != before
    label = moved.cases[0].label
    assert label is not None
    write_nifti(moved.resolve(label), np.zeros((6, 16, 18), np.uint8), affine=np.eye(4))
    assert data_hash(moved) != before
    members(manifest, lambda values: values * 1.01)
    assert data_hash(manifest) != before


@pytest.mark.parametrize("name", ["label.mhd", "label.nhdr"])
def test_the_hash_of_the_data_follows_voxels_that_lie_in_a_file_of_their_own(tmp_path: Path, name: str) -> None:
    manifest = write_ensemble(tmp_path, n_cases=1, split={"calibration": [0]})
    content = manifest.model_dump(mode="json", exclude_none=True)
    content["cases"][0]["label"] = name
    manifest = Manifest.from_content(content, manifest.path)

    def hash_with(labels: NDArray[Any]) -> str:
        image = SimpleITK.GetImageFromArray(labels.astype(np.uint8))
        SimpleITK.WriteImage(image, str(tmp_path / name))
        return data_hash(manifest)

    labels = np.zeros((6, 16, 18))
    before = hash_with(labels)
    labels[3, 8, 8] = 1
    assert hash_with(labels) != before
    labels[3, 8, 8] = 0
    assert hash_with(labels) == before


def test_kept_trials_of_data_that_changed_are_not_used(tmp_path: Path) -> None:
    manifest = write_ensemble(tmp_path, n_cases=3, split=SPLIT)
    asked: list[str] = []

    def run() -> None:
        asked.clear()
        fit(
            manifest, method="ms_c", trials=2, storage=tmp_path / "trials.log", device=CPU,
            progress=lambda stage, done, total: asked.append(stage),
        )  # fmt: skip

    run()
    run()
    assert "tuning ms_c" not in asked
    members(manifest, lambda values: values * 3)
    run()
    assert asked.count("tuning ms_c") == 2


@pytest.mark.parametrize("regions", [False, True])
def test_a_member_that_lies_otherwise_than_the_others_is_told_by_fit_apply_and_evaluate(
    tmp_path: Path, regions: bool
) -> None:
    """The mean of all hides it: the decision may still be that of the others."""
    manifest = sharp_ensemble(tmp_path, regions=regions)
    if regions:
        members(manifest, lambda old: 2 * old - 6)
    name = manifest.cases[0].members[1]
    with np.load(manifest.resolve(name)) as content:
        logits = content["logits"]
    np.savez(manifest.resolve(name), logits=np.ascontiguousarray(logits[:, :, ::-1]))
    for text in told(manifest, tmp_path):
        assert "1 of " in text
        assert f"case_00: {name} agrees with {manifest.cases[0].members[0]} when it is turned: y flipped" in text


@pytest.mark.parametrize("length", [1, 2, SIDE - 1, SIDE, SIDE + 1, 155, 240, 1001])
def test_what_is_glanced_at_is_the_same_from_both_ends(length: int) -> None:
    values = np.zeros((1, length, 1, 1), np.float32)
    values[0, :, 0, 0] = np.arange(length)
    member = Member(values, "logits")
    turned = Member(np.ascontiguousarray(values[:, ::-1]), "logits")
    seen = [_places(length), length - 1 - _places(length)[::-1]]
    assert np.array_equal(*seen)
    assert len(set(seen[0])) == min(length, SIDE)
    assert glance(member, regions=True).flip(1).equal(glance(turned, regions=True))
