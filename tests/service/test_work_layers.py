"""Numbers in few bytes: shares to half a step, images to half a step or exactly, whatever they hold."""

from __future__ import annotations

from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch

from segcal.service.work import quantised
from segcal.service.work.quantised import Stored, stored_image, stored_share, window
from segcal.types import Grid
from tests.apply_data import rotated


def numbers(stored: Stored) -> np.ndarray:
    """What a reader of the file gets: NIfTI keeps slope and intercept in float32."""
    return stored.values * np.float64(np.float32(stored.slope)) + np.float64(np.float32(stored.intercept))


def test_shares_do_not_depend_on_how_many_planes_are_worked_on_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    share = torch.rand((7, 5, 6), generator=torch.Generator().manual_seed(0))
    whole = stored_share((7, 5, 6), share.__getitem__)
    monkeypatch.setattr(quantised, "_CHUNK_VALUES", 31)
    parts = stored_share((7, 5, 6), share.__getitem__)
    assert (whole.values == parts.values).all()
    assert np.abs(numbers(whole) - share.numpy()).max() <= 0.5 / 255 + 1e-6


def test_rounding_beyond_0_and_1_stays_within() -> None:
    stored = stored_share((1, 1, 3), lambda planes: torch.tensor([[[-1e-7, 1 + 1e-6, 0.5]]]))
    assert stored.values.ravel().tolist() == [0, 255, 128]


@pytest.mark.parametrize(
    "image",
    [
        np.linspace(-1.0, 1.0, 240),
        np.linspace(1e6, 1e6 + 1, 240),
        np.geomspace(1e-30, 1e-20, 240),
        np.linspace(-3e38, 3e38, 240),
        np.arange(240) * 1000.0,
    ],
)
def test_images_are_kept_to_half_a_step_of_65534(image: np.ndarray) -> None:
    truth = image.astype(np.float32).reshape(4, 6, 10)
    span = float(truth.max()) - float(truth.min())
    stored = stored_image(truth.copy())
    rounding = 2 * float(np.spacing(np.abs(truth).max()))
    assert np.abs(numbers(stored) - truth.astype(np.float64)).max() <= 0.51 * span / 65534 + rounding


def test_whole_numbers_a_constant_and_what_is_no_number() -> None:
    whole = np.arange(-120, 120, dtype=np.float32).reshape(4, 6, 10)
    assert (numbers(stored_image(whole.copy())) == whole).all()
    assert (numbers(stored_image(np.full((1, 2, 2), 0.25, np.float32))) == 0.25).all()
    holes = whole + np.float32(0.5)
    holes[0, 0, 0], holes[0, 0, 1] = np.nan, np.inf
    shown = numbers(stored_image(holes.copy()))
    assert np.abs(shown[0, 0, :2] - np.nanmin(holes[1:, :, :].min(initial=-117.5))).max() < 0.01
    nothing = stored_image(np.full((1, 2, 2), np.nan, np.float32))
    assert (numbers(nothing) == 0).all()


def test_the_window_leaves_rare_extremes_out_and_is_never_empty() -> None:
    image = np.zeros((10, 20, 20), np.float32)
    image[:5] = 100
    image[0, 0, 0] = 1e6
    assert window(image) == (0.0, 100.0)
    assert window(np.full((2, 2, 2), 7.0, np.float32)) == (7.0, 8.0)
    spot = np.zeros((10, 20, 20), np.float32)
    spot[0, 0, 0] = 5
    assert window(spot) == (0.0, 5.0)


def test_the_same_volume_gives_the_same_bytes_and_the_affine_comes_back(tmp_path: Path) -> None:
    stored = Stored(np.arange(24, dtype=np.int16).reshape(2, 3, 4), 0.5, -3.0)
    grid = Grid((2, 3, 4), rotated())
    for name in ("a.nii.gz", "b.nii.gz"):
        stored.save(tmp_path / name, grid)
    assert (tmp_path / "a.nii.gz").read_bytes() == (tmp_path / "b.nii.gz").read_bytes()
    image = nib.load(tmp_path / "a.nii.gz")
    assert np.allclose(image.affine, rotated(), atol=1e-5)  # type: ignore[attr-defined]
    assert (0.5 * stored.values - 3 == np.asarray(image.dataobj).T).all()  # type: ignore[attr-defined]
