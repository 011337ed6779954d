"""Intervals of calibration errors that are to hold the truth whether or not it can be told from 0.

The truth is the error of all rows there could be *in the same bins*; that of ECE_bin is at most the error without bins.
An error is a norm N of the gaps of bins, and the measured gaps g + Z carry noise Z. A norm is convex, so noise raises
it on average, N(g) <= E N(g + Z), and the upper end needs no correction for bias. The lower one has to allow for the
bias E N(g + Z) - N(g), which is not known but bounded twice:

- by the triangle inequality it is at most E N(Z), the mean error of resampled rows whose bins lost their gaps;
- E N(g + t Z) is convex in t, and resampled rows carry the noise twice over (t = sqrt 2), so the bias is at most
  (1 + sqrt 2) times what resampling adds to the error. That is little where gaps are clear.

The second bound is itself measured, with noise, so it is used only where the value lies above the noise limit. A basic
interval takes the bias for what resampling adds, and at g = 0 takes off only 41 % of it.

The upper end has to allow for noise that lowered the value. A norm lies above its tangents, N(g + Z) >= N(g) + s Z, so
that noise is at most -s Z. Resampled values show it where gaps are clear; a value near 0 has resampled ones that are
folded at 0 and lie too close to it, most of all where one bin has nearly all rows. There the deviation of N(Z), a sum
of folded noises, is unfolded: for one bin, and for independent bins that are added up as in ECE, s Z has that of N(Z)
divided by sqrt(1 - 2/pi).

In a difference on the same rows draws show how the two move together, but only where both can be told from 0. One that
cannot has no known sign: over-confidence of one and under-confidence of the other are driven apart by the same noise,
and folded draws hide it. Then the rise of the one and the unfolded fall of the other are added up: as they are for one
bin, as if independent for many, in between by a rule of thumb.

What is not proved: both bounds are of means, and what they are compared with is drawn. The second needs noise whose sum
with a copy of itself is itself times sqrt 2, as normal noise is; the first, E N(Z), is estimated by resampling, which
knows little of a bin of a few rows; and the width is that of resampled errors, not of new ones. So there is no
guarantee for any number of rows, only the coverage measured in docs/classification_metrics.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from segcal.classification.metrics.rows import Floats

MOST_GROWTH = 1.0 + math.sqrt(2.0)
FOLDED = math.sqrt(1.0 - 2.0 / math.pi)
"""Standard deviation of |Z| where Z is normal with deviation 1."""


@dataclass(frozen=True, slots=True, eq=False)
class DrawnError:
    """A calibration error of one pipeline.

    Attributes:
        value: on all rows.
        replicates: (replicate,) on resampled rows.
        noise: (replicate,) the same after the gap of every bin was taken out.
    """

    value: float
    replicates: Floats
    noise: Floats

    def noise_limit(self, level: float) -> float:
        """What noise alone exceeds with probability 1 - level."""
        return float(np.quantile(self.noise, level))

    def most_bias(self, level: float) -> float:
        """How much of the value may be noise, on average."""
        whole = float(self.noise.mean())
        if self.value <= self.noise_limit(level):
            return whole
        return min(whole, MOST_GROWTH * max(float(self.replicates.mean()) - self.value, 0.0))

    def most_loss(self, level: float) -> float:
        """How far noise may have lowered the value, at the upper end of the level."""
        below, _ = spread(self.replicates, level)
        return max(below, NormalDist().inv_cdf((1.0 + level) / 2.0) * float(self.noise.std()) / FOLDED)

    @property
    def one_bin_share(self) -> float:
        """1 where the noise is that of one bin, 1/sqrt(d) where it is that of d equal ones: mean over spread."""
        mean, deviation = float(self.noise.mean()), float(self.noise.std())
        return min(math.sqrt(2.0 / math.pi) / FOLDED * deviation / mean, 1.0) if mean > 0 else 1.0

    def interval(self, level: float) -> tuple[float, float]:
        """The two ends, not below 0."""
        _, above = spread(self.replicates, level)
        return max(self.value - self.most_bias(level) - above, 0.0), max(self.value + self.most_loss(level), 0.0)


def difference_interval(first: DrawnError, second: DrawnError, level: float) -> tuple[float, float]:
    """The two ends of `first` minus `second` on the same draws: either may be raised by noise, and not alike."""
    apart = first.replicates - second.replicates
    difference = first.value - second.value
    if np.all(apart == difference):  # the same in every draw: what noise does to them is the same too
        return difference, difference
    return (
        difference - first.most_bias(level) - _most_lead(first, second, level),
        difference + second.most_bias(level) + _most_lead(second, first, level),
    )


def _most_lead(up: DrawnError, down: DrawnError, level: float) -> float:
    """How far noise may have driven one error above another, on top of its bias."""
    paired = spread(up.replicates - down.replicates, level)[1]
    if down.value > down.noise_limit(level):
        return paired
    rise, fall = spread(up.replicates, level)[1], down.most_loss(level)
    return max(paired, math.sqrt(rise**2 + fall**2 + 2.0 * down.one_bin_share * rise * fall))


def spread(replicates: Floats, level: float) -> tuple[float, float]:
    """How far replicates lie below and above their mean, at the two ends of the level."""
    low, high = np.quantile(replicates, ((1.0 - level) / 2.0, (1.0 + level) / 2.0))
    mean = float(replicates.mean())
    return mean - float(low), float(high) - mean
