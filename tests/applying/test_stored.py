"""Half precision on disk: the same numbers as rounding everything and restoring the decision everywhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from segcal.applying.stored import store_classes
from segcal.preserve import keep_decision


@pytest.mark.parametrize("n_classes", [2, 3, 5, 12])
@pytest.mark.parametrize("sharpness", [1e-4, 0.1, 1.0, 8.0])
def test_only_voxels_that_can_tie_are_looked_at_and_nothing_is_missed(n_classes: int, sharpness: float) -> None:
    generator = torch.Generator().manual_seed(n_classes)
    logits = sharpness * torch.randn(n_classes, 9, 17, 13, generator=generator)
    logits[:, :4] = logits[:, :4].round(decimals=1)  # many exact ties
    probs = torch.softmax(logits, 0)
    decision = probs.max(0).indices
    stored = store_classes(probs, decision, "float16")
    assert np.array_equal(stored, keep_decision(probs.half(), decision).numpy())
    assert np.array_equal(stored.argmax(0), decision.numpy())
