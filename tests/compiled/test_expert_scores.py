"""One loop for all experts: the scores of the torch form, and of every voxel by itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.conformance.drawn import draw_calibrator

METHODS = pytest.mark.parametrize("name", ["cdc", "cms_ap", "cms_op"])


def draw_voxels(n_classes: int, n_voxels: int) -> tuple[Tensor, Tensor]:
    """(C, n) float32 logits with ties among them, and decisions: long runs of one class, single ones, wrong ones."""
    generator = torch.Generator().manual_seed(n_classes)
    logits = torch.randn(n_classes, n_voxels, generator=generator) * 3
    logits[:, ::7] = torch.randint(-2, 3, logits[:, ::7].shape, generator=generator).float()
    logits[-1, n_voxels // 3 : n_voxels // 2] += 20
    decision = logits.argmax(0)
    wrong = torch.rand(n_voxels, generator=generator) < 0.02
    return logits, torch.where(wrong, torch.randint(0, n_classes, (n_voxels,), generator=generator), decision)


@METHODS
@pytest.mark.parametrize("n_classes", [2, 3, 5, 16])
def test_scores_are_those_of_the_torch_form(name: str, n_classes: int) -> None:
    calibrator = draw_calibrator(name, n_classes)
    logits, decision = draw_voxels(n_classes, 3001)
    exact = calibrator.voxel_scores(logits.double(), decision)  # type: ignore[attr-defined]
    torch.testing.assert_close(
        calibrator.voxel_scores(logits, decision).double(),  # type: ignore[attr-defined]
        exact,
        rtol=2e-6,
        atol=2e-5,
    )


@pytest.mark.parametrize("name", ["cms_ap", "cms_op"])  # the features of cdc are torch's log-softmax
@pytest.mark.parametrize("step", [1, 100, 256, 1024])
def test_a_voxel_has_the_same_scores_wherever_it_stands(name: str, step: int) -> None:
    calibrator = draw_calibrator(name, 4)
    logits, decision = draw_voxels(4, 2100)
    whole = calibrator.voxel_scores(logits, decision)  # type: ignore[attr-defined]
    order = torch.randperm(2100, generator=torch.Generator().manual_seed(1))
    pieces = [
        calibrator.voxel_scores(logits[:, part], decision[part])  # type: ignore[attr-defined]
        for part in (order[k : k + step] for k in range(0, 2100, step))
    ]
    assert torch.equal(whole[:, order], torch.cat(pieces, 1))


@METHODS
def test_decisions_in_bytes_are_as_good_as_long_ones(name: str) -> None:
    calibrator = draw_calibrator(name, 3)
    logits, decision = draw_voxels(3, 500)
    assert torch.equal(
        calibrator.voxel_probs(logits, decision), calibrator.voxel_probs(logits, decision.to(torch.uint8))
    )


def test_more_classes_than_comparing_is_good_for_are_ranked_by_the_torch_form() -> None:
    calibrator = draw_calibrator("cms_op", 18)
    logits, decision = draw_voxels(18, 300)
    exact = calibrator.voxel_log_probs(logits.double(), decision)
    torch.testing.assert_close(calibrator.voxel_log_probs(logits, decision).double(), exact, rtol=1e-5, atol=1e-4)
