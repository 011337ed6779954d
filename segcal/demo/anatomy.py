"""The phantom's truth: an organ with lesions and a thin vessel, how ambiguous each voxel is, and the image of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

from segcal.demo.fields import Field, Shape, Spacing, gumbel_fields, smooth_field

CLASSES = ("background", "organ", "lesion", "vessel")
BACKGROUND, ORGAN, LESION, VESSEL = range(4)
BRIGHTNESS = np.array([62.0, 118.0, 86.0, 168.0], dtype=np.float32)
"""Mean image intensity of each class."""


@dataclass(frozen=True, slots=True, eq=False)
class Anatomy:
    """One case before any network has seen it.

    Attributes:
        log_probs: (class, z, y, x), log of the probability with which each class is the true label.
        labels: (z, y, x) int16, one draw from these probabilities.
        image: (z, y, x), intensities with partial volume, shading and noise.
    """

    log_probs: Field
    labels: NDArray[np.int16]
    image: Field

    @property
    def shape(self) -> Shape:
        """Voxels (z, y, x)."""
        z, y, x = self.labels.shape
        return z, y, x


def draw_anatomy(rng: np.random.Generator, shape: Shape, spacing_mm: Spacing) -> Anatomy:
    """Draws shapes, then labels from their latent probabilities, then the image."""
    points = _millimetres(shape, spacing_mm)
    extent_mm = np.array(shape) * np.array(spacing_mm)
    log_probs = _latent_log_probs(rng, points, extent_mm, shape, spacing_mm)
    draw = log_probs + gumbel_fields(rng, len(CLASSES), shape, spacing_mm, length_mm=2.5)
    labels = draw.argmax(axis=0).astype(np.int16)
    return Anatomy(log_probs, labels, _image(rng, labels, points, shape, spacing_mm))


def _millimetres(shape: Shape, spacing_mm: Spacing) -> Field:
    """(3, z, y, x): position of every voxel in millimetres from the centre of the volume."""
    axes = [(np.arange(n) - (n - 1) / 2) * step for n, step in zip(shape, spacing_mm, strict=True)]
    return np.stack(np.meshgrid(*axes, indexing="ij")).astype(np.float32)


def _latent_log_probs(
    rng: np.random.Generator, points: Field, extent_mm: NDArray[np.float64], shape: Shape, spacing_mm: Spacing
) -> Field:
    """A tree of three decisions, each a logistic of signed depth / local ambiguity.

    inside the organ? -> inside a vessel? -> inside a lesion? Depth is in millimetres, and the ambiguity (also in
    millimetres) varies smoothly, so the same contour is sharp here and a matter of opinion there.
    """
    ambiguity_mm = 0.75 * np.exp(0.5 * smooth_field(rng, shape, spacing_mm, 14.0))
    centre = rng.uniform(-0.04, 0.04, 3) * extent_mm
    radii = extent_mm * rng.uniform(0.29, 0.38, 3)
    organ = _ellipsoid_depth(points, centre, radii) + 2.5 * smooth_field(rng, shape, spacing_mm, 9.0)
    lesion = _lesion_depth(rng, points, centre, radii) + 1.2 * smooth_field(rng, shape, spacing_mm, 4.0)
    vessel = _vessel_depth(rng, points, centre, radii)
    in_organ, in_lesion, in_vessel = organ / ambiguity_mm, lesion / ambiguity_mm, vessel / (0.5 * ambiguity_mm)
    return np.stack(
        [
            _log_sigmoid(-in_organ),
            _log_sigmoid(in_organ) + _log_sigmoid(-in_vessel) + _log_sigmoid(-in_lesion),
            _log_sigmoid(in_organ) + _log_sigmoid(-in_vessel) + _log_sigmoid(in_lesion),
            _log_sigmoid(in_organ) + _log_sigmoid(in_vessel),
        ]
    )


def _log_sigmoid(x: Field) -> Field:
    return np.asarray(-np.logaddexp(np.float32(0), -x), dtype=np.float32)


def _ellipsoid_depth(points: Field, centre: NDArray[np.float64], radii: NDArray[np.float64]) -> Field:
    """Signed depth below an ellipsoid's surface in millimetres (exact on a sphere, close enough elsewhere)."""
    scaled = (points - centre[:, None, None, None].astype(np.float32)) / radii[:, None, None, None].astype(np.float32)
    return np.asarray((1 - np.sqrt((scaled**2).sum(axis=0))) * radii.mean(), dtype=np.float32)


def _lesion_depth(
    rng: np.random.Generator, points: Field, centre: NDArray[np.float64], radii: NDArray[np.float64]
) -> Field:
    """One to three round lesions placed between the organ's centre and its surface."""
    depths = []
    for _ in range(int(rng.integers(1, 4))):
        direction = rng.standard_normal(3)
        place = centre + radii * direction / np.linalg.norm(direction) * rng.uniform(0.3, 0.75)
        depths.append(
            _ellipsoid_depth(points, place, radii.mean() * rng.uniform(0.24, 0.38) * rng.uniform(0.85, 1.15, 3))
        )
    return np.asarray(np.max(depths, axis=0), dtype=np.float32)


def _vessel_depth(
    rng: np.random.Generator, points: Field, centre: NDArray[np.float64], radii: NDArray[np.float64]
) -> Field:
    """A tube of about two voxels' radius that winds through the organ along z: the rare class."""
    phase, bend = rng.uniform(0, 2 * np.pi), rng.uniform(0.25, 0.45)
    turn = phase + 2.2 * (points[0] - centre[0]) / radii[0]
    y = centre[1] + bend * radii[1] * np.sin(turn)
    x = centre[2] + bend * radii[2] * np.cos(turn)
    tube_mm = 0.09 * radii.mean()
    return np.asarray(tube_mm - np.hypot(points[1] - y, points[2] - x), dtype=np.float32)


def _image(
    rng: np.random.Generator,
    labels: NDArray[np.int16],
    points: Field,
    shape: Shape,
    spacing_mm: Spacing,
) -> Field:
    """Tissue in a round body, blurred by the scanner (partial volume), shaded, textured and noisy; air around it."""
    tissue = BRIGHTNESS[labels] + 6.0 * smooth_field(rng, shape, spacing_mm, 3.0)
    body = np.hypot(points[1] / (0.49 * shape[1] * spacing_mm[1]), points[2] / (0.485 * shape[2] * spacing_mm[2])) < 1
    tissue = np.where(body, tissue, 4.0)
    blurred = gaussian_filter(tissue, [1.6 / step for step in spacing_mm], mode="nearest")
    shading = 1 + 0.06 * smooth_field(rng, shape, spacing_mm, 25.0)
    return np.asarray(blurred * shading + rng.normal(0, 5.0, shape), dtype=np.float32)
