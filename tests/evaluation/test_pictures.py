"""The picture of a case is the slice that looking at whole volumes would have chosen, and shows what they hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from segcal.cases import CaseData, load_case
from segcal.errors import GeometryError
from segcal.evaluation.picture_maps import PictureMaps, informative_slice
from segcal.evaluation.pictures import case_picture
from segcal.fitted import FittedCalibrator
from segcal.manifest import Manifest


def whole_maps(data: CaseData, probs: torch.Tensor) -> PictureMaps:
    assert data.labels is not None
    return PictureMaps(
        segmentation=data.decision.numpy().astype(np.int16),
        confidence_before=torch.softmax(data.logits, 0).amax(0).half().numpy(),
        confidence_after=probs.amax(0).half().numpy(),
        label=data.labels.numpy().astype(np.int16),
        flips=(probs.argmax(0) != data.decision).numpy(),
        free_energy=torch.logsumexp(data.logits, 0).half().numpy(),
    )


@pytest.mark.parametrize("method", ["ms", "cms_ap"])
def test_the_picture_is_the_informative_slice_of_the_volumes(
    phantom: Manifest, fitted: dict[str, FittedCalibrator], method: str
) -> None:
    for case in phantom.cases[:4]:
        data = load_case(phantom, case, pooling="logits", device=torch.device("cpu"), with_labels=True)
        probs = fitted[method].volume_probs(data)
        asked: list[int] = []

        def one_slice(index: int, probs: torch.Tensor = probs, asked: list[int] = asked) -> torch.Tensor:
            asked.append(index)
            return probs[:, index]

        picture = case_picture(phantom, case, data, one_slice, can_flip=method == "ms")

        whole = whole_maps(data, probs)
        assert picture.index == informative_slice(whole)
        for name in ("segmentation", "confidence_before", "confidence_after", "label", "flips", "free_energy"):
            expected = getattr(whole, name)[picture.index : picture.index + 1]
            np.testing.assert_array_equal(getattr(picture.maps, name), expected, err_msg=name)
        if method == "cms_ap":  # it flips nothing, so only the slice that is shown is made
            assert asked == [picture.index]


def test_an_image_on_another_grid_is_refused(
    phantom: Manifest, fitted: dict[str, FittedCalibrator], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = phantom.cases[0]
    data = load_case(phantom, case, pooling="logits", device=torch.device("cpu"), with_labels=True)
    probs = fitted["ts"].volume_probs(data)
    shallow = np.zeros((3, *data.logits.shape[2:]), dtype=np.float32)
    monkeypatch.setattr("segcal.evaluation.pictures.read_image", lambda _: type("Image", (), {"values": shallow}))
    with pytest.raises(GeometryError, match=f"{case.id}: the image has shape"):
        case_picture(
            phantom,
            case.model_copy(update={"image": "image.nii.gz"}),
            data,
            lambda index: probs[:, index],
            can_flip=False,
        )
