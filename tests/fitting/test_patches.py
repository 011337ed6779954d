"""The sample of patches: exact temperatures, unbiased sums, one answer for any order, bounded memory."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from segcal.calibrators.local_temperature import (
    LocalTemperatureScaling,
    LocalTemperatureScalingTI,
    tree_temperature,
)
from segcal.errors import DataError, ParameterError
from segcal.fitting.patches import PatchReservoir, PatchSample

Case = tuple[str, Tensor, Tensor]


def draw_case(case_id: str, shape: tuple[int, int, int], *, seed: int, n_classes: int = 3) -> Case:
    """Confident background with a doubtful column in the middle; labels follow the softmax."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(n_classes, *shape, generator=generator)
    logits[0] += 8 * torch.linspace(-1, 1, shape[2]).abs()
    noise = -(-torch.rand(logits.shape, generator=generator).log()).log()  # Gumbel
    return case_id, logits, (logits + noise).argmax(0)


def collect(cases: list[Case], **settings: int) -> PatchReservoir:
    reservoir = PatchReservoir(**{"seed": 0, **settings})
    for case in cases:
        reservoir.add(*case)
    return reservoir


def nll_sums(sample: PatchSample, temperature: float) -> Tensor:
    """(n,) NLL of softmax(z / T) summed over the voxels of each patch that count."""
    log_q = torch.log_softmax(sample.logits[:, :, 4:-4, 4:-4].double() / temperature, 1)
    return F.nll_loss(log_q, sample.labels, ignore_index=-1, reduction="none").sum((1, 2))


@pytest.mark.parametrize("cls", [LocalTemperatureScaling, LocalTemperatureScalingTI])
@pytest.mark.parametrize("shape", [(2, 21, 13), (1, 1, 1), (2, 3, 7), (1, 5, 5), (1, 9, 8)])
@pytest.mark.parametrize("patch_size", [1, 4, 8, 64])
def test_a_voxel_has_the_temperature_of_its_volume_also_at_the_border(cls, shape, patch_size: int) -> None:
    _, logits, labels = draw_case("a", shape, seed=1)
    # The last class carries each voxel's number (exact in float32), so a patch says where its voxels come from.
    logits[2] = torch.arange(labels.numel()).reshape(shape) / 64
    generator = torch.Generator().manual_seed(2)
    weight = 0.05 * torch.randn(7, 3, 5, 5, generator=generator, dtype=torch.float64)
    calibrator = cls(weight, torch.randn(7, generator=generator, dtype=torch.float64))
    expected = calibrator.temperatures(logits.double()).reshape(-1)

    sample = collect([("a", logits, labels)], patch_size=patch_size).sample()
    padded = sample.logits.double()
    features = padded.log_softmax(1) if cls.translation_invariant else padded
    tau = tree_temperature(features, calibrator.weight, calibrator.bias)

    counts = sample.labels >= 0
    voxel = (sample.logits[:, 2, 4:-4, 4:-4][counts] * 64).long()
    torch.testing.assert_close(tau[counts], expected[voxel], rtol=1e-12, atol=0)
    assert torch.equal(sample.labels[counts], labels.reshape(-1)[voxel])
    assert sorted(voxel.tolist()) == list(range(labels.numel()))


def test_a_sample_that_holds_everything_has_weight_one_everywhere() -> None:
    cases = [draw_case(f"case_{k}", (3, 20, 17), seed=k) for k in range(2)]

    sample = collect(cases).sample()

    assert sample.n_voxels == 2 * 3 * 20 * 17 == int((sample.labels >= 0).sum())
    assert torch.equal(sample.weights, torch.ones_like(sample.weights))
    assert sample.labels.shape[1:] == (7, 6)  # 20 and 17 pixels in three nearly equal pieces each


@pytest.mark.parametrize(("temperature", "max_patches"), [(1.0, 30), (3.0, 30), (1.5, 5)])
def test_weighted_sums_over_the_patches_are_unbiased(temperature: float, max_patches: int) -> None:
    # With 5 patches even the off-by-one threshold (the smallest kept priority) would be 20 % off.
    cases = [draw_case(f"case_{k}", (2, 24, 24), seed=k) for k in range(3)]
    exact = float(nll_sums(collect(cases, patch_size=4).sample(), temperature).sum())

    estimates = []
    unweighted = []
    for seed in range(300):
        sample = collect(cases, seed=seed, max_patches=max_patches, patch_size=4).sample()
        sums = nll_sums(sample, temperature)
        assert sample.n_patches == max_patches
        estimates.append(float((sample.weights * sums).sum()))
        unweighted.append(float(sums.mean()) * 3 * 2 * 36)

    error = np.std(estimates) / math.sqrt(len(estimates))
    assert abs(np.mean(estimates) - exact) < 3.5 * error
    assert error < 0.04 * exact
    # The control: without the weights the tiles that were preferred would count too much.
    assert abs(np.mean(unweighted) - exact) > 8 * error


def test_sampling_by_score_is_sharper_than_equal_chances() -> None:
    case_id, logits, labels = draw_case("case", (4, 32, 32), seed=3)
    logits[0, :, :, :24] += 20.0
    labels[:, :, :24] = 0
    sums = nll_sums(collect([(case_id, logits, labels)], patch_size=4).sample(), 1.5).numpy()
    estimates = []
    for seed in range(60):
        sample = collect([(case_id, logits, labels)], seed=seed, max_patches=60, patch_size=4).sample()
        estimates.append(float((sample.weights * nll_sums(sample, 1.5)).sum()))

    equal_chances = len(sums) * sums.std() / math.sqrt(60)
    assert np.std(estimates) < 0.5 * equal_chances


def same(left: PatchSample, right: PatchSample) -> bool:
    return (
        torch.equal(left.logits, right.logits)
        and torch.equal(left.labels, right.labels)
        and torch.equal(left.weights, right.weights)
        and left.n_voxels == right.n_voxels
    )


def test_neither_the_order_of_the_cases_nor_the_workers_matter() -> None:
    cases = [draw_case(f"case_{k}", (2, 20 + k, 18), seed=k) for k in range(5)]
    expected = collect(cases, max_patches=40).sample()

    left, right = collect(cases[3:], max_patches=40), collect(cases[:3], max_patches=40)
    left.merge(right)

    assert same(collect(cases[::-1], max_patches=40).sample(), expected)
    assert same(left.sample(), expected)
    assert not same(collect(cases, max_patches=40, seed=1).sample(), expected)


def test_memory_is_bounded_by_patches_and_by_bytes() -> None:
    cases = [draw_case(f"case_{k}", (4, 40, 40), seed=k) for k in range(4)]
    by_count, by_bytes = collect(cases, max_patches=25), collect(cases, max_bytes=10 * 4 * 3 * 16 * 16)

    assert by_count.sample().n_patches == 25
    assert by_bytes.sample().n_patches == 10
    for reservoir, limit in ((by_count, 25), (by_bytes, 10)):
        tiles = [entry[3] for entry in reservoir._heap]
        # What is kept is a copy of the tile, not a view that holds on to the volume.
        held = sum(tile.logits.untyped_storage().nbytes() for tile in tiles)
        assert held <= (limit + 1) * 4 * 3 * 16 * 16
        assert all(tile.labels.untyped_storage().nbytes() <= 8 * 64 for tile in tiles)


def test_ignored_voxels_are_seen_by_their_neighbours_but_never_count() -> None:
    case_id, logits, labels = draw_case("a", (3, 16, 16), seed=4)
    labels[0] = -1
    labels[1, :8, :8] = -1
    labels[2, 0, 0] = -1

    sample = collect([(case_id, logits, labels)]).sample()

    assert sample.n_patches == 4 * 3 - 4 - 1
    assert sample.n_voxels == int((labels >= 0).sum()) == int((sample.labels >= 0).sum())
    assert torch.equal(sample.logits[3, :, 4:-4, 4:-4], logits[:, 2, :8, :8])


def test_a_tile_with_a_confident_mistake_is_kept_before_certain_ones() -> None:
    logits = torch.zeros(2, 1, 64, 64)
    logits[0] = 30.0
    labels = torch.zeros(1, 64, 64, dtype=torch.int64)
    labels[0, 37, 50] = 1

    kept = [
        bool((collect([("a", logits, labels)], seed=s, max_patches=8).sample().labels == 1).any()) for s in range(20)
    ]

    assert sum(kept) >= 18  # equal chances: 8 of 64 tiles


def test_half_precision_logits_and_small_labels_are_welcome() -> None:
    case_id, logits, labels = draw_case("a", (2, 10, 10), seed=5)

    sample = collect([(case_id, logits.half(), labels.to(torch.int16))]).sample()

    assert (sample.logits.dtype, sample.labels.dtype, sample.weights.dtype) == (
        torch.float32,
        torch.int64,
        torch.float64,
    )
    assert same(sample, collect([(case_id, logits.half().float(), labels)]).sample())


def broken(**change: Tensor) -> tuple[str, Tensor, Tensor]:
    arrays = {"logits": torch.zeros(3, 2, 8, 8), "labels": torch.zeros(2, 8, 8, dtype=torch.int64)} | change
    return "case_7", arrays["logits"], arrays["labels"]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (broken(logits=torch.full((3, 2, 8, 8), float("nan"))), "case_7.*NaN or infinite"),
        (broken(labels=torch.full((2, 8, 8), 3)), "case_7.*from 3 to 3, expected class indices 0 to 2"),
        (broken(labels=torch.full((2, 8, 8), -2)), "case_7.*from -2"),
        (broken(labels=torch.zeros(2, 8, 9, dtype=torch.int64)), "case_7.*do not belong together"),
        (broken(logits=torch.zeros(3, 0, 8, 8), labels=torch.zeros(0, 8, 8, dtype=torch.int64)), "at least one voxel"),
    ],
)
def test_what_cannot_be_sampled_is_an_error_that_names_the_case(case: Case, message: str) -> None:
    with pytest.raises(DataError, match=message):
        PatchReservoir(seed=0).add(*case)


def test_a_case_counts_once_and_all_cases_have_the_same_classes() -> None:
    reservoir = collect([draw_case("a", (1, 8, 8), seed=0)])

    with pytest.raises(DataError, match="a: added twice"):
        reservoir.add(*draw_case("a", (1, 8, 8), seed=0))
    with pytest.raises(DataError, match="b: 4 classes, the cases before it have 3"):
        reservoir.add(*draw_case("b", (1, 8, 8), seed=0, n_classes=4))
    with pytest.raises(DataError, match="a: added to both"):
        reservoir.merge(collect([draw_case("a", (1, 8, 8), seed=0)]))


def test_reservoirs_with_other_settings_do_not_merge() -> None:
    with pytest.raises(ParameterError, match="different settings"):
        PatchReservoir(seed=0).merge(PatchReservoir(seed=1))
    with pytest.raises(ParameterError, match="at least 1"):
        PatchReservoir(seed=0, max_patches=0)


def test_no_labelled_voxel_is_an_error() -> None:
    nothing = broken(labels=torch.full((2, 8, 8), -1))
    with pytest.raises(DataError, match="no labelled voxel"):
        collect([nothing]).sample()
