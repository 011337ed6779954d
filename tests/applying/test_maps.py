"""Maps made run by run are those of the whole volume."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from segcal.applying.maps import calibrated_maps, confidence_map, entropy_map
from segcal.applying.record import ApplySettings
from segcal.applying.stored import StorageType, store_classes
from segcal.calibrators import CALIBRATORS
from segcal.chunks import chunk_budget
from segcal.fitted import FittedCalibrator
from segcal.threads import one_thread
from segcal.types import Box
from tests.apply_data import drawn_case, make_fitted
from tests.conformance.drawn import draw_calibrator


def settings(dtype: StorageType) -> ApplySettings:
    return ApplySettings(
        format="nnunet",
        dtype=dtype,
        confidence=True,
        entropy=True,
        kind="logits",
        pooling="logits",
        axes="czyx",
        label_values=(0, 1, 2),
    )


@pytest.mark.parametrize("name", list(CALIBRATORS))
@pytest.mark.parametrize("dtype", ["float32", "float16", "uint16"])
@pytest.mark.parametrize("crop", [None, ((2, 6), (1, 9), (0, 7))])
def test_runs_of_voxels_give_what_the_volume_gives(name: str, dtype: StorageType, crop: Box | None) -> None:
    fitted = FittedCalibrator(draw_calibrator(name, 3), make_fitted(name).info)
    case = drawn_case(crop)
    # Chunks of 1,024 voxels: the 693 of the case are one, so neither way of cutting changes a rounding.
    with chunk_budget(1), one_thread():
        probs = fitted.volume_probs(case)
        decision = case.decision if fitted.info.preserves else probs.max(0).indices
        found = calibrated_maps(fitted, case, settings(dtype), regions=False)

    assert np.array_equal(found.probabilities, store_classes(probs, decision, dtype))
    assert np.array_equal(found.segmentation, decision.numpy())
    assert np.array_equal(found.extras["confidence"], confidence_map(probs, regions=False))
    assert np.array_equal(found.extras["entropy"], entropy_map(probs, regions=False))
    assert found.crop == crop


def test_a_decision_that_is_kept_is_kept_outside_the_crop_too() -> None:
    case = drawn_case(((2, 6), (1, 9), (0, 7)))
    case.decision[0, 0, 0] = 2
    for method, kept in (("ts", 2), ("dc", 0)):
        found = calibrated_maps(make_fitted(method), case, settings("float32"), regions=False)
        assert found.segmentation[0, 0, 0] == kept
        assert torch.equal(torch.from_numpy(found.probabilities[:, 0, 0, 0]), torch.tensor([1.0, 0.0, 0.0]))
