"""The phantom is what the demo says it is: believable, over-confident, uncertain where it says so, reproducible."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, softmax

from segcal.demo.anatomy import CLASSES, VESSEL, Anatomy, draw_anatomy
from segcal.demo.ensemble import Habits, draw_member_logits, logit_offset
from segcal.demo.fields import gumbel_fields, smooth_field
from segcal.demo.phantom import make_phantom
from segcal.errors import UsageError
from segcal.manifest import Manifest, ManifestCase

SHAPE, SPACING_MM = (40, 64, 64), (2.5, 1.5, 1.5)
SMALL = (16, 24, 24)


@pytest.fixture(scope="module")
def phantom(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """Five cases of full size, two of them from the other site."""
    return Manifest.load(make_phantom(tmp_path_factory.mktemp("phantom"), n_cases=5, n_other_site=2))


@pytest.fixture(scope="module")
def anatomy() -> Anatomy:
    return draw_anatomy(np.random.default_rng(1), SHAPE, SPACING_MM)


def _logits(manifest: Manifest, case: ManifestCase) -> list[NDArray[np.float32]]:
    return [np.load(manifest.resolve(member))["logits"].astype(np.float32) for member in case.members]


def _labels(manifest: Manifest, case: ManifestCase) -> NDArray[np.int64]:
    assert case.label is not None
    return np.asarray(nib.load(manifest.resolve(case.label)).dataobj).T.astype(np.int64)


def _best_temperature(logits: NDArray[np.float32], labels: NDArray[np.int64]) -> float:
    rows, truth = logits.reshape(len(CLASSES), -1).astype(np.float64), labels.ravel()

    def nll(beta: float) -> float:
        return float(-log_softmax(beta * rows, axis=0)[truth, np.arange(truth.size)].mean())

    return float(1 / minimize_scalar(nll, bounds=(0.05, 5), method="bounded").x)


def test_every_file_of_the_manifest_has_the_promised_form(phantom: Manifest) -> None:
    for case in phantom.cases:
        members = [np.load(phantom.resolve(member)) for member in case.members]
        assert len(members) == 5
        assert all(member["logits"].dtype == np.float16 for member in members)
        assert all(member["logits"].shape == (4, *SHAPE) for member in members)
        assert all(np.isfinite(member["logits"]).all() for member in members)
        assert case.label is not None
        assert case.image is not None
        label, image = nib.load(phantom.resolve(case.label)), nib.load(phantom.resolve(case.image))
        assert label.shape == image.shape == SHAPE[::-1]
        assert np.array_equal(label.affine, image.affine)


def test_grids_are_anisotropic_oblique_and_stored_with_x_to_the_left(phantom: Manifest) -> None:
    for case in phantom.cases:
        assert case.label is not None
        affine = nib.load(phantom.resolve(case.label)).affine
        assert nib.affines.voxel_sizes(affine) == pytest.approx((1.5, 1.5, 2.5), rel=1e-5)
        assert nib.aff2axcodes(affine) == ("L", "P", "S")
        assert (np.abs(affine[:3, :3]) > 1e-3).sum() > 3


def test_every_case_shows_every_class_and_nothing_else_and_the_vessel_is_rare(phantom: Manifest) -> None:
    for case in phantom.cases:
        counts = np.bincount(_labels(phantom, case).ravel())
        assert len(counts) == len(CLASSES)
        assert counts.min() >= 50
        assert counts.argmin() == VESSEL
        assert counts[VESSEL] < 0.01 * counts.sum()


def test_split_tests_the_other_site_and_never_calibrates_on_it(phantom: Manifest) -> None:
    split = phantom.split_ids(0)
    other = {case.id for case in phantom.cases if case.group == "site_b"}
    assert len(other) == 2
    assert other < set(split.test)
    parts = (*split.calibration, *split.validation, *split.test)
    assert sorted(parts) == sorted(case.id for case in phantom.cases)
    assert split.calibration
    assert split.validation


def test_members_and_their_mean_are_overconfident_at_both_sites(phantom: Manifest) -> None:
    for case in (phantom.cases[0], phantom.cases[-1]):
        members, labels = _logits(phantom, case), _labels(phantom, case)
        assert _best_temperature(members[0], labels) > 1.2
        assert _best_temperature(np.mean(members, axis=0), labels) > 1.2


def test_segmentation_is_good_but_not_perfect(phantom: Manifest) -> None:
    for case in phantom.cases:
        decision, labels = np.mean(_logits(phantom, case), axis=0).argmax(axis=0), _labels(phantom, case)
        organ = 2 * ((decision == 1) & (labels == 1)).sum() / ((decision == 1).sum() + (labels == 1).sum())
        assert 0.75 < organ < 0.98


def test_members_disagree_near_contours_and_agree_in_the_interior(phantom: Manifest) -> None:
    case = phantom.cases[0]
    decisions = np.stack([member.argmax(axis=0) for member in _logits(phantom, case)])
    disputed = (decisions != decisions[0]).any(axis=0)
    doubt = 1 - softmax(np.mean(_logits(phantom, case), axis=0), axis=0).max(axis=0)
    assert 0.005 < disputed.mean() < 0.15
    assert doubt[disputed].mean() > 10 * doubt[~disputed].mean()


@pytest.mark.parametrize("site", ["site_a", "site_b"])
def test_offsets_change_the_logits_and_leave_the_probabilities(anatomy: Anatomy, site: str) -> None:
    def first_member(habits: Habits) -> NDArray[np.float32]:
        seeds = np.random.SeedSequence(3)
        return next(draw_member_logits(seeds, anatomy, SPACING_MM, site=site, n_members=1, habits=habits))

    plain, shifted = first_member(replace(Habits(), offset=0.0)), first_member(Habits())
    assert np.abs(shifted - plain).max() > 3
    assert np.abs(softmax(shifted, axis=0) - softmax(plain, axis=0)).max() < 1e-5


def test_offset_follows_the_organ_at_one_site_only(anatomy: Anatomy) -> None:
    inside = (anatomy.labels > 0).ravel()
    correlation = {}
    for site in ("site_a", "site_b"):
        offset = logit_offset(np.random.default_rng(0), anatomy, SPACING_MM, site=site)
        correlation[site] = np.corrcoef(offset.ravel(), inside)[0, 1]
    assert correlation["site_a"] > 0.8
    assert abs(correlation["site_b"]) < 0.3


def test_labels_are_drawn_with_the_latent_probabilities() -> None:
    """Over many draws of the Gumbel fields each class wins as often as softmax says."""
    log_probs = np.log(np.array([0.55, 0.25, 0.15, 0.05], dtype=np.float32))
    rng = np.random.default_rng(0)
    wins = np.zeros(4)
    for _ in range(30):
        fields = gumbel_fields(rng, 4, (20, 24, 24), SPACING_MM, length_mm=2.5)
        wins += np.bincount((log_probs[:, None, None, None] + fields).argmax(axis=0).ravel(), minlength=4)
    assert wins / wins.sum() == pytest.approx(np.exp(log_probs), abs=0.02)


def test_latent_probabilities_sum_to_one_and_doubt_is_real(anatomy: Anatomy) -> None:
    probs = np.exp(anatomy.log_probs.astype(np.float64))
    assert np.abs(probs.sum(axis=0) - 1).max() < 1e-5
    unsure = probs.max(axis=0) < 0.9
    assert 0.01 < unsure.mean() < 0.3
    right = probs.argmax(axis=0) == anatomy.labels
    assert right[unsure].mean() == pytest.approx(probs.max(axis=0)[unsure].mean(), abs=0.06)


@pytest.mark.parametrize("length_mm", [0.5, 3.0, 12.0])
def test_smooth_field_is_standardised_and_smoother_for_longer_lengths(length_mm: float) -> None:
    field = smooth_field(np.random.default_rng(0), SHAPE, SPACING_MM, length_mm)
    assert field.shape == SHAPE
    assert (field.mean(), field.std()) == pytest.approx((0, 1), abs=1e-4)
    longer = smooth_field(np.random.default_rng(0), SHAPE, SPACING_MM, 2 * length_mm)
    assert np.abs(np.diff(longer, axis=2)).mean() < np.abs(np.diff(field, axis=2)).mean()


def test_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    def digests(name: str, seed: int) -> dict[str, str]:
        folder = tmp_path / name
        make_phantom(folder, seed=seed, n_cases=4, n_other_site=1, shape=SMALL, n_members=2)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}

    first, again, other = digests("first", 0), digests("again", 0), digests("other", 1)
    assert len(first) == 4 * (2 + 2) + 1
    assert first == again
    assert first.keys() == other.keys()
    assert all(first[name] != other[name] for name in first if not name.endswith("manifest.yaml"))


def test_a_case_does_not_depend_on_how_many_follow(tmp_path: Path) -> None:
    for name, n_cases in (("few", 3), ("more", 4)):
        make_phantom(tmp_path / name, n_cases=n_cases, n_other_site=0, shape=SMALL, n_members=1)
    file = "member_0/phantom_003.npz"
    assert (tmp_path / "few" / file).read_bytes() == (tmp_path / "more" / file).read_bytes()


def test_progress_counts_the_cases(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    make_phantom(
        tmp_path, n_cases=3, n_other_site=0, shape=SMALL, n_members=1, progress=lambda *step: seen.append(step)
    )
    assert seen == [("phantom cases", done, 3) for done in (1, 2, 3)]


@pytest.mark.parametrize("wrong", [{"n_cases": 4, "n_other_site": 2}, {"n_members": 0}, {"shape": (4, 64, 64)}])
def test_impossible_sizes_are_refused(tmp_path: Path, wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="phantom needs"):
        make_phantom(tmp_path, **wrong)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
