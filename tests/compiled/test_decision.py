"""The compiled decision is torch's, ties included."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from segcal.compiled.decision import first_largest
from segcal.pooling import pooled_decision


@pytest.mark.parametrize("n_voxels", [0, 1, 7, 1023, 1024, 5000])
@pytest.mark.parametrize("n_classes", [1, 2, 5, 40])
def test_the_first_largest_class_wins(n_classes: int, n_voxels: int) -> None:
    # Few distinct values, so that most voxels have ties.
    values = np.random.default_rng(n_voxels).integers(-2, 3, (n_classes, n_voxels)).astype(np.float32)
    found = np.full(n_voxels, -1, dtype=np.int64)
    first_largest(values, found)
    assert found.tolist() == (values.argmax(0).tolist() if n_voxels else [])


def test_a_view_that_is_not_contiguous_is_decided_alike() -> None:
    logits = torch.randn(3, 4, 5, 12, generator=torch.Generator().manual_seed(0))
    assert torch.equal(pooled_decision(logits[..., ::2], regions=False), logits[..., ::2].max(0).indices)
