"""The compiled pass over the voxels and its form in torch: the same rows, and sums that agree to rounding."""

from __future__ import annotations

import math

import pytest
import torch

from segcal.compiled.scores import PIECE
from segcal.errors import DataError
from segcal.fitting.hashing import voxel_uniforms
from segcal.fitting.voxel_pass import SCORE_FLOOR, CompiledPass, Noted, PassSums, TorchPass, VoxelPass, voxel_pass
from segcal.metrics.energy import FreeEnergy, mean_confidence
from tests.fitting.drawn import imbalanced_rows

N_VOXELS, N_CLASSES = 9 * PIECE + 77, 4
NO_BOUND = (0.0,) * N_CLASSES


def a_pass(kind: type[VoxelPass], *, with_places: bool = True, scale: float = 1.0, seed: int = 3) -> VoxelPass:
    rows = imbalanced_rows(N_VOXELS, N_CLASSES, seed=1)
    voxels = torch.arange(N_VOXELS).mul_(3).add_(2**33) if with_places else None
    return kind(seed, "case_1", rows.logits.T.contiguous() * scale, rows.labels, rows.decision, voxels)


def run(work: VoxelPass, step: int = 1 << 16, thresholds: tuple[float, ...] = NO_BOUND) -> tuple[Noted, PassSums]:
    n_voxels = work.labels.shape[0]
    parts = [work.block(begin, min(begin + step, n_voxels), thresholds) for begin in range(0, n_voxels, step)]
    return Noted(*(torch.cat(tensors) for tensors in zip(*parts, strict=True))), work.sums()


@pytest.mark.parametrize("with_places", [True, False])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_scores_and_sums_agree_to_rounding(scale: float, with_places: bool) -> None:
    noted, sums = run(a_pass(CompiledPass, scale=scale, with_places=with_places))
    expected, totals = run(a_pass(TorchPass, scale=scale, with_places=with_places))
    assert torch.equal(noted.where, expected.where)
    torch.testing.assert_close(noted.score, expected.score, rtol=4e-15, atol=0)
    torch.testing.assert_close(noted.priority, expected.priority, rtol=4e-15, atol=0)
    assert sums.control == pytest.approx(totals.control, rel=1e-13)
    assert sums.counts == totals.counts
    assert sums.confidence == pytest.approx(totals.confidence, rel=1e-13)
    assert sums.energy.count == totals.energy.count == N_VOXELS
    assert (sums.energy.mean, sums.energy.squares) == pytest.approx(
        (totals.energy.mean, totals.energy.squares), rel=1e-12
    )


@pytest.mark.parametrize("seed", range(5))
def test_both_forms_keep_the_same_voxels(seed: int) -> None:
    bounds = (50.0, 0.9, 2.0, 1e9)
    noted, _ = run(a_pass(CompiledPass, seed=seed), thresholds=bounds)
    expected, _ = run(a_pass(TorchPass, seed=seed), thresholds=bounds)
    assert 0 < len(noted.where) < N_VOXELS
    assert torch.equal(noted.where, expected.where)


def test_the_random_number_of_a_voxel_is_the_same_bit_for_bit() -> None:
    work = a_pass(CompiledPass)
    noted, _ = run(work)
    assert work.voxels is not None
    assert torch.equal(noted.priority, noted.score / voxel_uniforms(work.seed, work.case_id, work.voxels))


def test_the_score_is_the_distance_of_the_tempered_softmax_from_the_label() -> None:
    work = a_pass(CompiledPass)
    noted, _ = run(work)
    apart = torch.softmax(work.logits.double() / 2, 0) - torch.nn.functional.one_hot(work.labels, N_CLASSES).T
    torch.testing.assert_close(noted.score - SCORE_FLOOR, apart.square().sum(0).sqrt(), rtol=0, atol=1e-15)


@pytest.mark.parametrize("kind", [CompiledPass, TorchPass])
def test_sums_are_those_qa_measures_one_by_one(kind: type[VoxelPass]) -> None:
    work = a_pass(kind)
    _, sums = run(work)
    energy = FreeEnergy()
    energy.update("case_1", work.logits)
    measured = energy.compute()["case_1"]
    assert sums.energy.mean == pytest.approx(measured["free_energy_mean"], rel=1e-13)
    assert sums.energy.std == pytest.approx(measured["free_energy_std"], rel=1e-12)
    # QA computes the confidence of a voxel in float32.
    assert sums.confidence / N_VOXELS == pytest.approx(mean_confidence(work.logits, regions=False), rel=1e-7)


@pytest.mark.parametrize("step", [PIECE, 2 * PIECE, 5 * PIECE])
def test_where_the_compiled_pass_is_cut_changes_no_bit(step: int) -> None:
    expected, totals = run(a_pass(CompiledPass))
    noted, sums = run(a_pass(CompiledPass), step)
    assert all(torch.equal(a, b) for a, b in zip(noted, expected, strict=True))
    assert sums == totals


@pytest.mark.parametrize("kind", [CompiledPass, TorchPass])
def test_infinite_logits_are_named(kind: type[VoxelPass]) -> None:
    work = a_pass(kind)
    work.logits[1, 5] = math.inf
    with pytest.raises(DataError, match="case_1: the logits hold NaN or infinity"):
        run(work)


@pytest.mark.parametrize("kind", [CompiledPass, TorchPass])
@pytest.mark.parametrize("place", range(N_CLASSES))
def test_a_nan_is_named_whichever_class_it_is_in(kind: type[VoxelPass], place: int) -> None:
    work = a_pass(kind)
    work.logits[place, 5] = math.nan
    with pytest.raises(DataError, match="case_1: the logits hold NaN or infinity"):
        run(work)


@pytest.mark.parametrize("field", ["labels", "decision"])
@pytest.mark.parametrize("value", [-1, N_CLASSES])
def test_what_is_no_class_index_is_refused(field: str, value: int) -> None:
    work = a_pass(CompiledPass)
    getattr(work, field)[100] = value
    with pytest.raises(ValueError, match="labels and decision must be from 0 to 3"):
        run(work)


def test_the_device_chooses_the_form() -> None:
    chosen = [
        voxel_pass(0, "a", torch.zeros(2, 1, device=device), *torch.zeros(2, 1, dtype=torch.int64, device=device), None)
        for device in ("cpu", "meta")
    ]
    assert [type(each) for each in chosen] == [CompiledPass, TorchPass]
