"""The phantom's networks: five over-confident members that agree in the interior and argue along the contours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy.ndimage import gaussian_filter

from segcal.demo.anatomy import BACKGROUND, CLASSES, Anatomy
from segcal.demo.fields import Field, Shape, Spacing, smooth_field

SITES = ("site_a", "site_b")


@dataclass(frozen=True, slots=True)
class Habits:
    """How the synthetic networks go wrong; the defaults are what the demo shows.

    Attributes:
        sharpness: factor on the true log-odds where each class is likely; > 1 is over-confidence, and it differs by
            class, so one temperature cannot mend all of it.
        bias: constant added to each class's logit (lesions are called too readily, vessels too rarely).
        shared_error: size of the error that all members make alike, in logits; averaging members does not remove it.
        member_error: size of the error each member makes on its own.
        offset: size of the spatial logit offset c(v), the same for all classes, so it moves no probability.
    """

    sharpness: tuple[float, float, float, float] = (1.6, 1.9, 2.6, 2.3)
    bias: tuple[float, float, float, float] = (0.0, 0.0, 0.5, -0.8)
    shared_error: float = 0.8
    member_error: float = 1.1
    offset: float = 5.0


def draw_member_logits(
    seeds: np.random.SeedSequence,
    anatomy: Anatomy,
    spacing_mm: Spacing,
    *,
    site: str,
    n_members: int,
    habits: Habits,
) -> Iterator[Field]:
    """Yields each member's logits (class, z, y, x) for one case.

    `z_m = sharpness(v) · (log p(v) + bias + shared error + member error) + c(v)·1`. Errors are smooth fields of a few
    logits: harmless in the interior, decisive where the truth itself is close to a tie.
    """
    common, offset_seed, *member_seeds = seeds.spawn(2 + n_members)
    shape = anatomy.shape
    rng = np.random.default_rng(common)
    canonical = np.maximum(anatomy.log_probs, -14.0)  # real networks saturate too
    centred = canonical - canonical.mean(axis=0)
    bias = np.array(habits.bias, dtype=np.float32)[:, None, None, None]
    believed = centred + bias + habits.shared_error * _error(rng, shape, spacing_mm, length_mm=6.0)
    sharpness = np.einsum("c,czyx->zyx", np.array(habits.sharpness, dtype=np.float32), np.exp(anatomy.log_probs))
    offset = habits.offset * logit_offset(np.random.default_rng(offset_seed), anatomy, spacing_mm, site=site)
    for member_seed in member_seeds:
        own = habits.member_error * _error(np.random.default_rng(member_seed), shape, spacing_mm, length_mm=4.5)
        yield np.asarray(sharpness * (believed + own) + offset, dtype=np.float32)


def _error(rng: np.random.Generator, shape: Shape, spacing_mm: Spacing, *, length_mm: float) -> Field:
    return np.stack([smooth_field(rng, shape, spacing_mm, length_mm) for _ in CLASSES])


def logit_offset(rng: np.random.Generator, anatomy: Anatomy, spacing_mm: Spacing, *, site: str) -> Field:
    """The offset c(v) (z, y, x) that a site's scanner leaves in the logits, about -1 ... 1.

    At `site_a` it is high around the organ and low elsewhere: a calibrator that is not translation-invariant takes it
    for evidence. At `site_b` it rises along y instead, and the evidence is false.
    """
    shape = anatomy.shape
    if site == "site_a":
        foreground = 1 - np.exp(anatomy.log_probs[BACKGROUND])
        pattern = 2 * gaussian_filter(foreground, [5.0 / step for step in spacing_mm], mode="nearest") - 1
    else:
        pattern = np.broadcast_to(np.linspace(-1, 1, shape[1], dtype=np.float32)[:, None], shape)
    return np.asarray(pattern + 0.15 * smooth_field(rng, shape, spacing_mm, 12.0), dtype=np.float32)
